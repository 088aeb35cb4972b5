"""Secrets: values that units get and nobody reads back. They come from a file or standard input, never an argument."""

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from penstock.cli import completing
from penstock.cli.errors import CliError
from penstock.cli.many import say_each
from penstock.cli.output import ID, Column, Format
from penstock.cli.session import Session, command, group
from penstock.wire.rest import Secret, SecretVersion

app = group("secret", "Values for units that nobody can read back.")

VALUE_BYTES_MAX: Final = 64 << 10

COLUMNS: list[Column[Secret]] = [
    Column("name", lambda secret: secret.name, rank=ID),
    Column("version", lambda secret: secret.version),
    Column("updated", lambda secret: secret.updated_at),
    Column("updated by", lambda secret: secret.updated_by),
    Column("created", lambda secret: secret.created_at),
    Column("created by", lambda secret: secret.created_by),
]
VERSION_COLUMNS: list[Column[SecretVersion]] = [
    Column("version", lambda version: version.version),
    Column("created", lambda version: version.created_at),
    Column("created by", lambda version: version.created_by),
]

SecretName = Annotated[str, typer.Argument(help="The secret's name.", autocompletion=completing.secrets)]


@command(app, "set", example="penstock secret set db-password --from-file password.txt")
def set_(
    session: Session,
    name: SecretName,
    from_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Take the bytes of this file.")] = None,
    from_stdin: Annotated[bool, typer.Option("--from-stdin", help="Take the bytes of standard input.")] = False,
) -> None:
    """Set a secret; without an option, its value is asked for. Units that are made from now on get it."""
    value = _value(session, from_file, from_stdin=from_stdin)
    if not 1 <= len(value) <= VALUE_BYTES_MAX:
        raise CliError(f"the value must have 1 to {VALUE_BYTES_MAX} bytes", field="value")
    with session.client() as client:
        session.output.item(client.secrets.set(name, value), COLUMNS)


@command(app, "list", example="penstock secret list -o csv")
def list_(session: Session) -> None:
    """List the names of secrets, with their versions."""
    with session.client() as client:
        session.output.items(client.secrets.list(), COLUMNS)


@command(app, "show", example="penstock secret show db-password")
def show(session: Session, name: SecretName) -> None:
    """Show a secret's versions, without their values."""
    with session.client() as client:
        found = client.secrets.get(name)
    session.output.item(found, COLUMNS)
    if session.output.format is Format.TABLE:
        session.output.line("")
        session.output.items(found.versions, VERSION_COLUMNS)


@command(app, "delete", example="penstock secret delete db-password")
def delete(
    session: Session,
    secrets: Annotated[
        list[str], typer.Argument(metavar="SECRET…", help="The secrets' names.", autocompletion=completing.secrets)
    ],
) -> None:
    """Delete secrets. Units that run keep what they got."""
    with session.client() as client:

        def delete(text: str) -> str:
            client.secrets.delete(text)
            return f"deleted secret {text}"

        say_each(session, secrets, delete)


def _value(session: Session, file: Path | None, *, from_stdin: bool) -> bytes:
    if file is not None and from_stdin:
        raise CliError("give --from-file or --from-stdin, not both", field="from-file")
    if file is not None:
        return _of_file(file)
    if from_stdin:
        return sys.stdin.buffer.read(VALUE_BYTES_MAX + 1)
    session.need_input("the value")
    if not sys.stdin.isatty():
        raise CliError("give the value with --from-file or --from-stdin", field="from-stdin")
    return typer.prompt("value", hide_input=True, err=True).encode()


def _of_file(file: Path) -> bytes:
    try:
        with file.open("rb") as source:
            return source.read(VALUE_BYTES_MAX + 1)
    except OSError as error:
        raise CliError(f"cannot read {file}: {error.strerror}", field="from-file") from error

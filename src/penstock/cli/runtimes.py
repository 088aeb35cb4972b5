"""Environments of the project: a base image with the packages of a lock file."""

from pathlib import Path
from typing import Annotated, Final

import typer

from penstock.cli.errors import CliError
from penstock.cli.output import Column, Format, notice
from penstock.cli.session import Session, command, group
from penstock.wire.rest import Runtime

app = group("runtime", "Environments: an image with the packages of a lock file.")

#: What the server takes at most.
_LOCK_BYTES_MAX: Final = 512 << 10
_DIGEST_SHOWN: Final = 12

COLUMNS: list[Column[Runtime]] = [
    Column("name", lambda item: item.name),
    Column("base", lambda item: item.base),
    Column("packages", lambda item: item.packages),
    Column("version", lambda item: item.version),
    Column("digest", lambda item: item.digest[:_DIGEST_SHOWN]),
    Column("updated", lambda item: item.updated_at),
]

RuntimeName = Annotated[str, typer.Argument(help="The environment's name.")]


@command(app, "put", example="penstock runtime put vision --lock requirements.lock")
def put(
    session: Session,
    name: RuntimeName,
    lock: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="A requirements file with hashes, as `uv pip compile --generate-hashes` writes it.",
        ),
    ],
    base: Annotated[str, typer.Option(help="The image that the packages come on top of.")] = "python:3",
) -> None:
    """Define or change an environment. Allocations keep the one that they were made with."""
    text = _read(lock)
    with session.client() as client:
        session.output.item(client.runtimes.put(name, text, base=base), COLUMNS)


@command(app, "list", example="penstock runtime list")
def list_(session: Session) -> None:
    """List environments."""
    with session.client() as client:
        session.output.items(client.runtimes.list(), COLUMNS)


@command(app, "show", example="penstock runtime show vision")
def show(session: Session, name: RuntimeName) -> None:
    """Show an environment and its lock, in its normal form."""
    with session.client() as client:
        found = client.runtimes.get(name)
    session.output.item(found, COLUMNS)
    if session.output.format is Format.TABLE:
        session.output.line("")
        for line in found.lock.splitlines():
            session.output.line(line.partition(" --hash")[0])


@command(app, "delete", example="penstock runtime delete vision")
def delete(session: Session, name: RuntimeName) -> None:
    """Forget an environment; refused while an allocation that has not ended uses it."""
    with session.client() as client:
        client.runtimes.delete(name)
    notice(f"deleted {name}")


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(_LOCK_BYTES_MAX + 1)
    except OSError as error:
        raise CliError(f"cannot read {file}: {error.strerror}", field="--lock") from error
    if len(content) > _LOCK_BYTES_MAX:
        raise CliError(f"{file} has more than {_LOCK_BYTES_MAX} bytes", field="--lock")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CliError(f"{file} is not text in UTF-8", field="--lock") from error

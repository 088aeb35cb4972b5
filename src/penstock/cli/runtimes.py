"""Environments of the project: a base image with packages, by name or by a lock file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli import completing
from penstock.cli.errors import CliError
from penstock.cli.many import say_each
from penstock.cli.output import ID, Column, Format, notice
from penstock.cli.progress import progress
from penstock.cli.session import Session, command, group
from penstock.wire.rest import Runtime

if TYPE_CHECKING:
    from penstock.sdk.client import Client

app = group("runtime", "Environments: an image with the packages of a lock file.")

#: What the server takes at most.
_LOCK_BYTES_MAX: Final = 512 << 10
_DIGEST_SHOWN: Final = 12

COLUMNS: list[Column[Runtime]] = [
    Column("name", lambda item: item.name, rank=ID),
    Column("base", lambda item: item.base),
    Column("packages", lambda item: item.packages),
    Column("version", lambda item: item.version),
    Column("digest", lambda item: item.digest[:_DIGEST_SHOWN]),
    Column("updated", lambda item: item.updated_at),
]

RuntimeName = Annotated[str, typer.Argument(help="The environment's name.", autocompletion=completing.runtimes)]


@command(app, "put", example="penstock runtime put vision --package numpy --package 'pillow>=11'")
def put(
    session: Session,
    name: RuntimeName,
    package: Annotated[list[str] | None, typer.Option(help="A package by name; may be given again.")] = None,
    requirements: Annotated[
        Path | None, typer.Option("--requirements", "-r", metavar="FILE", help="Packages by name, one to a line.")
    ] = None,
    lock: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A requirements file with hashes, as `uv pip compile --generate-hashes` writes it.",
        ),
    ] = None,
    base: Annotated[str, typer.Option(help="The image that the packages come on top of.")] = "python:3",
    upgrade: Annotated[bool, typer.Option("--upgrade", help="Resolve packages by name anew.")] = False,
) -> None:
    """Define or change an environment. Packages by name are resolved to a lock by the servers. Allocations keep the
    environment that they were made with."""
    text = _given(package or [], requirements, lock)
    with session.client() as client:
        if lock is None:
            text = _resolved(client, text, base, upgrade=upgrade)
        session.output.item(client.runtimes.put(name, text, base=base), COLUMNS)


def _given(packages: list[str], requirements: Path | None, lock: Path | None) -> str:
    """The text of the one thing that was given."""
    from penstock.sdk.resolving import text_of

    if sum((bool(packages), requirements is not None, lock is not None)) != 1:
        raise CliError("give one of --package, --requirements and --lock", field="--lock")
    if requirements is not None:
        return _read(requirements, "--requirements")
    return _read(lock, "--lock") if lock is not None else text_of(packages)


def _resolved(client: "Client", text: str, base: str, *, upgrade: bool) -> str:
    from penstock.sdk.resolving import resolved

    notes: list[str] = []
    with progress("resolving") as report:
        made = resolved(client, text, base=base, upgrade=upgrade, report=report, note=notes.append)
    for note in notes:
        notice(note)
    return made


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
def delete(
    session: Session,
    runtimes: Annotated[
        list[str],
        typer.Argument(metavar="RUNTIME…", help="The environments' names.", autocompletion=completing.runtimes),
    ],
) -> None:
    """Forget environments; refused while an allocation that has not ended uses one."""
    with session.client() as client:

        def delete(text: str) -> str:
            client.runtimes.delete(text)
            return f"deleted runtime {text}"

        say_each(session, runtimes, delete)


def _read(file: Path, field: str) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(_LOCK_BYTES_MAX + 1)
    except OSError as error:
        raise CliError(f"cannot read {file}: {error.strerror}", field=field) from error
    if len(content) > _LOCK_BYTES_MAX:
        raise CliError(f"{file} has more than {_LOCK_BYTES_MAX} bytes", field=field)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CliError(f"{file} is not text in UTF-8", field=field) from error

"""Objects: files of a project that outlive units, sent and fetched piece by piece."""

import mimetypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import typer

from penstock.cli.errors import CONFLICT, CliError
from penstock.cli.many import say_each
from penstock.cli.output import ID, Column
from penstock.cli.progress import transfer
from penstock.cli.session import Session, command, group
from penstock.cli.text import size
from penstock.wire.rest import Object

app = group("object", "Files of a project that outlive units.")

_STREAM: Final = "-"

COLUMNS: list[Column[Object]] = [
    Column("key", lambda item: item.key, rank=ID),
    Column("size", lambda item: size(item.size)),
    Column("type", lambda item: item.content_type),
    Column("created", lambda item: item.created_at),
    Column("created by", lambda item: item.created_by),
    Column("sha256", lambda item: item.sha256),
]

Key = Annotated[str, typer.Argument(help="The object's key, such as models/small.bin.")]


@command(app, "put", example="penstock object put weights.bin models/weights.bin")
def put(
    session: Session,
    file: Annotated[str, typer.Argument(help="What to send; - is standard input.")],
    key: Key,
    content_type: Annotated[str | None, typer.Option(metavar="TYPE", help="What it is; guessed from the name.")] = None,
    only_new: Annotated[bool, typer.Option("--only-new", help="Fail if there is an object of this key.")] = False,
) -> None:
    """Store a file under a key, in the place of what was there."""
    kind = content_type or mimetypes.guess_type(key)[0] or "application/octet-stream"
    with _source(file) as (content, total), session.client() as client, transfer(key, total) as (done, _):
        made = client.objects.put(key, content, content_type=kind, only_new=only_new, on_progress=done)
    session.output.item(made, COLUMNS)


@command(app, "get", example="penstock object get models/weights.bin weights.bin")
def get(
    session: Session,
    key: Key,
    file: Annotated[
        str | None, typer.Argument(help="Where to write it; - is standard output. Default: the key's last part.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Fetch an object. A file appears when all of it is there and has been checked."""
    name = file or key.rsplit("/", 1)[-1]
    with session.client() as client, transfer(key, None) as (done, total):
        chunks = client.objects.get(key, on_size=total)
        with _target(name, force=force) as output:
            written = 0
            for chunk in chunks:
                output.write(chunk)
                written += len(chunk)
                done(written)


@command(app, "list", example="penstock object list models/ -o csv")
def list_(
    session: Session,
    prefix: Annotated[str, typer.Argument(help="Only keys that begin so.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="How many at most.")] = None,
) -> None:
    """List objects by key."""
    with session.client() as client:
        session.output.items(client.objects.list(prefix=prefix, limit=limit), COLUMNS)


@command(app, "delete", example="penstock object delete models/weights.bin")
def delete(
    session: Session,
    keys: Annotated[list[str], typer.Argument(metavar="KEY…", help="The objects' keys.")],
) -> None:
    """Delete objects."""
    with session.client() as client:

        def delete(text: str) -> str:
            client.objects.delete(text)
            return f"deleted object {text}"

        say_each(session, keys, delete)


@contextmanager
def _source(name: str) -> Iterator[tuple[Path | BinaryIO, int | None]]:
    """What to read, and how much it is where that can be known."""
    if name == _STREAM:
        yield sys.stdin.buffer, None
        return
    path = Path(name)
    try:
        if path.is_dir():
            raise CliError(f"{name} is a folder; an object is one file", field="file")
        with path.open("rb"):
            total = path.stat().st_size
    except OSError as error:
        raise CliError(f"cannot read {name}: {error.strerror}", field="file") from error
    yield path, total


@contextmanager
def _target(name: str, *, force: bool) -> Iterator[BinaryIO]:
    """Written beside the file, and put in its place in the end."""
    if name == _STREAM:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(name)
    if path.exists() and not force:
        raise CliError(f"{name} is there already", field="file", exit_code=CONFLICT, next_step="--force replaces it")
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with draft.open("xb") as output:
            yield output
        draft.replace(path)
    except OSError as error:
        raise CliError(f"cannot write {name}: {error.strerror or error}", field="file") from error
    finally:
        draft.unlink(missing_ok=True)

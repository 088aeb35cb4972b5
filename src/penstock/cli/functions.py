"""Functions: deploy, call and look after them."""

from typing import Annotated, Final

import typer

from penstock.cli import calling, completing, serving
from penstock.cli.many import Done, each, say_each
from penstock.cli.output import EXTRA, ID, NEEDED, Column
from penstock.cli.session import Session, command, group
from penstock.cli.text import Count
from penstock.wire.rest import DeadLetter, Function, FunctionVersion, FunctionWorker, Invocation

app = group("fn", "Functions: deploy, call and look after them.")
dead_letters = group("dlq", "What functions could not do.")
app.add_typer(dead_letters)


def _version(item: Function) -> str:
    if item.serving_version == item.current_version:
        return str(item.current_version)
    return f"{item.current_version} ({item.serving_version} serves)"


def _workers(item: Function) -> str:
    starting = f" +{item.workers_starting} starting" if item.workers_starting else ""
    return f"{item.workers_ready}{starting}"


COLUMNS: list[Column[Function]] = [
    Column("name", lambda item: item.name, rank=ID),
    Column("version", _version),
    Column("sku", lambda item: item.definition.sku),
    Column("workers", _workers),
    Column("queued", lambda item: item.queued),
    Column("running", lambda item: item.running),
    Column("updated", lambda item: item.updated_at),
    Column("waiting for", lambda item: item.waiting_for, rank=EXTRA),
]
DETAIL_COLUMNS: list[Column[Function]] = [
    *COLUMNS,
    Column("url", lambda item: item.url),
    Column("handler", lambda item: item.definition.handler),
    Column("command", lambda item: item.definition.command),
    Column("gpus", lambda item: item.definition.gpus),
    Column("image", lambda item: item.definition.image),
    Column("runtime", lambda item: item.definition.runtime),
    Column("concurrency", lambda item: item.definition.concurrency),
    Column("workers min", lambda item: item.definition.workers_min),
    Column("workers max", lambda item: item.definition.workers_max),
    Column("idle seconds", lambda item: item.definition.idle_s),
    Column("timeout seconds", lambda item: item.definition.timeout_s),
    Column("retries", lambda item: item.definition.retries),
    Column("retry for", lambda item: item.definition.retry_for),
    Column("secrets", lambda item: [secret.name for secret in item.definition.secrets]),
    Column("schedule", lambda item: item.definition.schedule.cron if item.definition.schedule else None),
    Column("webhook", lambda item: item.definition.webhook),
    Column("code", lambda item: item.definition.code.object if item.definition.code else None),
    Column("created", lambda item: item.created_at),
]
VERSION_COLUMNS: list[Column[FunctionVersion]] = [
    Column("version", lambda item: item.number),
    Column("current", lambda item: item.current),
    Column("serving", lambda item: item.serving),
    Column("handler", lambda item: item.definition.handler),
    Column("code", lambda item: item.definition.code.sha256[:12] if item.definition.code else ""),
    Column("created", lambda item: item.created_at),
    Column("created by", lambda item: item.created_by),
]
WORKER_COLUMNS: list[Column[FunctionWorker]] = [
    Column("name", lambda item: item.name, rank=ID),
    Column("state", lambda item: item.state, rank=NEEDED),
    Column("version", lambda item: item.version),
    Column("inflight", lambda item: f"{item.inflight}/{item.slots}"),
    Column("served", lambda item: Count(item.served)),
    Column("allocation", lambda item: item.allocation_id),
    Column("ready", lambda item: item.ready_at),
    Column("reason", lambda item: item.reason, rank=EXTRA),
]
INVOCATION_COLUMNS: list[Column[Invocation]] = [
    Column("id", lambda item: item.id, rank=ID),
    Column("function", lambda item: item.function),
    Column("state", lambda item: item.state, rank=NEEDED),
    Column("attempts", lambda item: item.attempts),
    Column("milliseconds", lambda item: Count(item.duration_ms)),
    Column("created", lambda item: item.created_at),
    Column("reason", lambda item: item.error or item.waiting_for, rank=EXTRA),
]
LETTER_COLUMNS: list[Column[DeadLetter]] = [
    Column("id", lambda item: item.id, rank=ID),
    Column("function", lambda item: item.function),
    Column("invocation", lambda item: item.invocation_id),
    Column("class", lambda item: item.failure_class),
    Column("error", lambda item: item.error, rank=EXTRA),
    Column("created", lambda item: item.created_at),
    Column("replayed as", lambda item: item.replayed_as),
]

Name = calling.Name
InvocationIds = Annotated[
    list[str],
    typer.Argument(metavar="INVOCATION…", help="The invocations' ids.", autocompletion=completing.invocations),
]
LetterIds = Annotated[list[str], typer.Argument(metavar="LETTER…", help="The dead letters' ids.")]
STATES: Final = ("queued", "dispatching", "running", "succeeded", "failed", "expired", "cancelled", "dead_lettered")
Limit = Annotated[int, typer.Option(min=1, help="How many at most.")]

command(app, "deploy", example="penstock fn deploy images.py")(serving.deploy)
command(app, "serve", example="penstock fn serve images.py")(serving.serve)
command(app, "invoke", example="penstock fn invoke images-resize -d '{\"width\": 64}'")(calling.invoke)


@command(app, "list", example="penstock fn list")
def list_(session: Session, limit: Limit = 1000) -> None:
    """List functions."""
    with session.client() as client:
        session.output.items(client.functions.list(limit=limit), COLUMNS)


@command(app, "show", example="penstock fn show images-resize")
def show(session: Session, name: Name) -> None:
    """Show a function, and why workers are missing."""
    with session.client() as client:
        session.output.item(client.functions.get(name), DETAIL_COLUMNS)


@command(app, "versions", example="penstock fn versions images-resize")
def versions(session: Session, name: Name, limit: Limit = 100) -> None:
    """List what a function was."""
    with session.client() as client:
        session.output.items(client.functions.versions(name, limit=limit), VERSION_COLUMNS)


@command(app, "workers", example="penstock fn workers images-resize")
def workers(session: Session, name: Name, limit: Limit = 1000) -> None:
    """List the units that serve a function."""
    with session.client() as client:
        session.output.items(client.functions.workers(name, limit=limit), WORKER_COLUMNS)


command(app, "logs", example="penstock fn logs images-resize -f")(calling.logs)


@command(app, "invocations", example="penstock fn invocations images-resize --state failed")
def invocations(
    session: Session,
    name: Annotated[
        str | None, typer.Argument(help="Only of this function.", autocompletion=completing.functions)
    ] = None,
    state: Annotated[
        str | None, typer.Option(help="Only in this state.", autocompletion=completing.words(*STATES))
    ] = None,
    limit: Limit = 100,
) -> None:
    """List invocations, newest first."""
    with session.client() as client:
        session.output.items(client.invocations.list(function=name, state=state, limit=limit), INVOCATION_COLUMNS)


command(app, "status", example="penstock fn status inv-0123456789abcdef")(calling.status)
command(app, "result", example="penstock fn result inv-0123456789abcdef --out picture.png")(calling.result)


@command(app, "cancel", example="penstock fn cancel inv-0123456789abcdef")
def cancel(session: Session, invocations: InvocationIds) -> None:
    """Stop invocations, in whatever phase they are."""
    with session.client() as client:
        _show(session, each(session, invocations, client.invocations.cancel))


@command(app, "retry", example="penstock fn retry inv-0123456789abcdef")
def retry(session: Session, invocations: InvocationIds) -> None:
    """Do ended invocations again, as new ones."""
    with session.client() as client:
        _show(session, each(session, invocations, client.invocations.retry))


def _show(session: Session, done: "Done[Invocation]") -> None:
    if done.many:
        session.output.items(done.values, INVOCATION_COLUMNS)
    else:
        session.output.item(done.values[0], INVOCATION_COLUMNS)
    done.end()


@command(app, "rollback", example="penstock fn rollback images-resize --to 3")
def rollback(
    session: Session,
    name: Name,
    to: Annotated[int | None, typer.Option(min=1, help="The version; by default the one before.")] = None,
) -> None:
    """Make an earlier version the current one."""
    with session.client() as client:
        session.output.item(client.functions.rollback(name, version=to), DETAIL_COLUMNS)


@command(app, "delete", example="penstock fn delete images-resize")
def delete(
    session: Session,
    functions: Annotated[
        list[str],
        typer.Argument(metavar="FUNCTION…", help="The functions' names.", autocompletion=completing.functions),
    ],
) -> None:
    """Delete functions: what waits fails, what runs may finish."""
    with session.client() as client:

        def delete(name: str) -> str:
            client.functions.delete(name)
            return f"deleted function {name}"

        say_each(session, functions, delete)


@command(dead_letters, "list", example="penstock fn dlq list")
def list_letters(session: Session, limit: Limit = 100) -> None:
    """List what could not be done, newest first."""
    with session.client() as client:
        session.output.items(client.function_dead_letters.list(limit=limit), LETTER_COLUMNS)


@command(dead_letters, "replay", example="penstock fn dlq replay dlt_01k9z3v5x7y9a1b3c5d7e9f1g3")
def replay(session: Session, letters: LetterIds) -> None:
    """Make new invocations of dead letters."""
    with session.client() as client:
        _show(session, each(session, letters, client.function_dead_letters.replay))


@command(dead_letters, "discard", example="penstock fn dlq discard dlt_01k9z3v5x7y9a1b3c5d7e9f1g3")
def discard(session: Session, letters: LetterIds) -> None:
    """Give dead letters up."""
    with session.client() as client:

        def discard(letter: str) -> str:
            client.function_dead_letters.discard(letter)
            return f"discarded dead letter {letter}"

        say_each(session, letters, discard)

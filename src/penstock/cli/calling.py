"""Calls functions from the command line, and shows what they say and answer."""

import base64
import json
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli import completing
from penstock.cli.errors import CONFLICT, EXHAUSTED, FAILED, TIMEOUT, YOUR_CODE, CliError
from penstock.cli.interrupts import explained
from penstock.cli.output import EXTRA, ID, NEEDED, Column, Format, notice
from penstock.cli.session import Session
from penstock.cli.text import Count, clean, size
from penstock.wire.rest import Invocation, OutputLine

if TYPE_CHECKING:
    from penstock.sdk.client import Client
    from penstock.sdk.functions.transport import Answer

_PAYLOAD_BYTES_MAX: Final = 20 << 20
_WAIT_S: Final = 600.0

LINE_COLUMNS: list[Column[OutputLine]] = [
    Column("at", lambda line: line.at),
    Column("invocation", lambda line: line.invocation),
    Column("kind", lambda line: line.kind),
    Column("text", lambda line: line.text, rank=EXTRA),
]
STATUS_COLUMNS: list[Column[Invocation]] = [
    Column("id", lambda item: item.id, rank=ID),
    Column("function", lambda item: item.function),
    Column("state", lambda item: item.state, rank=NEEDED),
    Column("waiting for", lambda item: item.waiting_for),
    Column("mode", lambda item: item.mode),
    Column("version", lambda item: item.version),
    Column("worker", lambda item: item.worker),
    Column("attempts", lambda item: item.attempts),
    Column("progress", lambda item: json.dumps(item.progress, ensure_ascii=False) if item.progress else None),
    Column("status code", lambda item: item.status_code or None),
    Column("class", lambda item: item.failure_class),
    Column("error", lambda item: f"{item.error_type}: {item.error}" if item.error_type else item.error, rank=EXTRA),
    Column("milliseconds", lambda item: Count(item.duration_ms)),
    Column("created", lambda item: item.created_at),
    Column("started", lambda item: item.started_at),
    Column("finished", lambda item: item.finished_at),
    Column("result", lambda item: size(item.result.bytes) if item.result else None),
]

Name = Annotated[
    str, typer.Argument(help="The function's name, such as images-resize.", autocompletion=completing.functions)
]
InvocationId = Annotated[str, typer.Argument(help="The invocation's id.", autocompletion=completing.invocations)]
#: Failures that are the handler's own; all others are the cloud's.
_OF_HANDLERS: Final = frozenset(
    {"handler_error", "framework_timeout", "framework_error", "oom", "result_too_large", "framework_unhealthy"}
)
_OF_CAPACITY: Final = frozenset({"activation_timeout", "backpressure"})


def invoke(
    session: Session,
    name: Name,
    payload: Annotated[
        str | None,
        typer.Option("-d", "--payload", metavar="JSON|@FILE", help="What it is given; @- is standard input."),
    ] = None,
    asynchronous: Annotated[bool, typer.Option("--async", help="Do not wait; print the invocation's id.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print what it says and yields as it comes.")] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="How long to wait at most.")] = _WAIT_S,
) -> None:
    """Call a function and print its result. An object becomes keyword arguments if every name is a parameter."""
    from penstock.sdk.remote import new_invocation_id

    body, chosen = _payload(payload), new_invocation_id()
    with session.client() as client, explained(lambda: _left_behind(session, chosen)):
        if asynchronous:
            ack = client.functions.invoke(name, body, invocation=chosen)
            session.output.json(ack) if session.output.format is Format.JSON else session.output.line(ack.invocationID)
        elif stream:
            _follow(session, client, client.functions.invoke(name, body, mode="stream", invocation=chosen).invocationID)
        else:
            _print(session, _call(session, client, name, body, chosen, timeout))


def _left_behind(session: Session, invocation_id: str) -> str:
    cancel = session.line("fn", "cancel", invocation_id)
    return f"{invocation_id} goes on if it was accepted, and is charged then; this ends it: {cancel}"


def _call(session: Session, client: "Client", name: str, body: bytes, invocation_id: str, timeout_s: float) -> "Answer":
    from penstock.sdk.functions.errors import ResultTimeout
    from penstock.sdk.functions.values import JSON, Payload
    from penstock.sdk.remote import Outside

    try:
        with closing(Outside(client)) as way:
            return way.call(name, Payload(JSON, body), timeout_s, invocation_id=invocation_id)
    except ResultTimeout as error:
        status, cancel = (session.line("fn", verb, invocation_id) for verb in ("status", "cancel"))
        message = f"{error}; it goes on: see `{status}`, end it with `{cancel}`"
        raise CliError(message, code="wait_timeout", exit_code=TIMEOUT) from None


def _payload(text: str | None) -> bytes:
    """JSON, checked here: a typing error is named before anything is sent."""
    if text is None:
        return b"null"
    content = _read(text[1:]) if text.startswith("@") else text.encode(errors="surrogateescape")
    if len(content) > _PAYLOAD_BYTES_MAX:
        raise CliError(f"--payload has more than {_PAYLOAD_BYTES_MAX} bytes", field="--payload")
    try:
        json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CliError(f"--payload is not JSON: {error}", field="--payload") from error
    return content


def _read(name: str) -> bytes:
    try:
        if name == "-":
            return sys.stdin.buffer.read(_PAYLOAD_BYTES_MAX + 1)
        with Path(name).open("rb") as file:
            return file.read(_PAYLOAD_BYTES_MAX + 1)
    except OSError as error:
        raise CliError(f"cannot read {name}: {error.strerror}", field="--payload") from error


def _print(session: Session, answer: "Answer") -> None:
    if answer.state != "succeeded":
        raise _failed(session, answer)
    _print_body(session, answer.content_type, answer.body)


def _print_body(session: Session, content_type: str, body: Any) -> None:
    """A text as it is, bytes as they are, any other value as JSON; with -o json everything as JSON."""
    if session.output.format is Format.JSON:
        session.output.json(_encoded(content_type, body) if isinstance(body, bytes) else body)
    elif isinstance(body, bytes):
        sys.stdout.buffer.write(body)
        sys.stdout.flush()
    elif isinstance(body, str):
        session.output.line("\n".join(map(clean, body.split("\n"))))
    else:
        session.output.json(body)


def _encoded(content_type: str, body: bytes) -> dict[str, str]:
    """Bytes inside JSON, in the API's fields of an invocation."""
    return {"content_type": content_type, "encoding": "base64", "body": base64.b64encode(body).decode()}


def _failed(session: Session, answer: "Answer") -> CliError:
    """The error of a call that did not succeed. How it ended is printed first: with -o json as the one value of the
    output, else as the handler's own words."""
    first, _, rest = answer.error.partition("\n")
    if session.output.format is Format.JSON:
        session.output.json_line(_end(answer))
    else:
        for line in (*rest.splitlines(), *answer.traceback.splitlines()):
            notice(line)
    what = f"{answer.error_type}: {first}" if answer.error_type else first
    message = f"{answer.invocation_id} {answer.state}" + (f": {what}" if what else "")
    return CliError(message, code=answer.state, exit_code=_exit_code(answer))


def _end(answer: "Answer") -> dict[str, str]:
    """How a call ended, in the API's fields of an invocation."""
    return {
        "id": answer.invocation_id,
        "state": answer.state,
        "failure_class": answer.failure_class,
        "error_type": answer.error_type,
        "error": answer.error,
        "traceback": answer.traceback,
    }


def _exit_code(answer: "Answer") -> int:
    if answer.error_type or answer.failure_class in _OF_HANDLERS:
        return YOUR_CODE
    return EXHAUSTED if answer.failure_class in _OF_CAPACITY else FAILED


def _follow(session: Session, client: "Client", invocation_id: str) -> None:
    streamed = False
    for said in client.invocations.follow(invocation_id):
        if isinstance(said, OutputLine):
            streamed = streamed or said.kind == "chunk"
            _print_said(session, said)
        elif said.state != "succeeded":
            raise _failed(session, _answer(said))
        elif not streamed:
            _print_result(session, client, invocation_id)


def _answer(found: Invocation) -> "Answer":
    from penstock.sdk.functions.transport import Answer

    return Answer(
        found.id,
        found.state,
        failure_class=found.failure_class,
        error=found.error,
        error_type=found.error_type,
        traceback=found.traceback,
    )


def _print_result(session: Session, client: "Client", invocation_id: str) -> None:
    """The result of an invocation, of any length."""
    from penstock.sdk.remote import read_result

    content_type = client.invocations.get(invocation_id).content_type
    content = b"".join(client.invocations.result(invocation_id))
    _print_body(session, content_type, read_result(content_type, content))


def _chunk(text: str) -> str:
    """A text as it is, any other value as JSON."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, str) else text


def _print_said(session: Session, said: OutputLine) -> None:
    """Chunks are the result; everything else is beside it."""
    if session.output.format is Format.JSON:
        session.output.json_line(said)
    elif said.kind == "chunk":
        session.output.line(clean(_chunk(said.text)))
        sys.stdout.flush()
    else:
        notice(f"{said.kind}: {said.text}")


def logs(
    session: Session,
    name: Name,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Print what is said from now on.")] = False,
    invocation: Annotated[str | None, typer.Option(help="Only of this invocation.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many lines at most, the last ones.")] = 1000,
) -> None:
    """Show what a function's handlers printed last, oldest first."""
    with session.client() as client:
        if follow:
            said = client.invocations.follow(invocation) if invocation else client.functions.follow(name)
            for line in said:
                if isinstance(line, OutputLine):
                    print_line(session, line)
            return
        last = list(client.functions.logs(name, invocation=invocation, newest_first=True, limit=limit))
    last.reverse()
    if session.output.format is Format.TABLE:
        for line in last:
            print_line(session, line)
    else:
        session.output.items(last, LINE_COLUMNS)


def print_line(session: Session, line: OutputLine) -> None:
    """One line, at once."""
    if session.output.format is Format.JSON:
        session.output.json_line(line)
        return
    kind = "" if line.kind == "stdout" else f"{line.kind}: "
    session.output.line(clean(f"{line.at:%H:%M:%S} {line.invocation} {kind}{line.text}"))
    sys.stdout.flush()


def status(session: Session, invocation: InvocationId) -> None:
    """Show an invocation: where it is, why it waits, how it ended."""
    with session.client() as client:
        found = client.invocations.get(invocation)
    session.output.item(found, STATUS_COLUMNS)
    if session.output.format is Format.TABLE:
        for line in found.traceback.splitlines():
            session.output.line(clean(line))


def result(
    session: Session,
    invocation: InvocationId,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it there instead of printing it.")] = None,
) -> None:
    """Print what an invocation answered: a text as it is, other values as JSON. With --out, byte for byte."""
    if out is not None and out.exists():
        raise CliError(f"{out} is there already", field="--out", exit_code=CONFLICT)
    with session.client() as client:
        if out is None:
            _print_result(session, client, invocation)
        else:
            _write(out, client.invocations.result(invocation))


def _write(out: Path, chunks: Iterable[bytes]) -> None:
    """The whole file or none of it."""
    draft = out.with_name(f".{out.name}.part")
    try:
        with draft.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
        draft.replace(out)
    except OSError as error:
        raise CliError(f"cannot write {out}: {error.strerror or error}", field="--out") from error
    finally:
        draft.unlink(missing_ok=True)

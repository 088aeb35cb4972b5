"""Everything that belongs to one request: what the API kept of it, and the log lines that are on this machine."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from penstock.cli.errors import CliError
from penstock.cli.local import data_folder
from penstock.cli.output import EXTRA, ID, Column, Format, notice
from penstock.cli.session import Session, command, group
from penstock.wire.rest import Evidence

app = group("evidence", "Gather everything that belongs to one request.")

_LINES_MAX: Final = 10_000
_NAMED: Final = ("timestamp", "level", "event", "correlation_id")


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the story."""

    at: datetime
    source: str
    what: str
    about: str
    detail: str


COLUMNS: list[Column[Item]] = [
    Column("at", lambda item: item.at),
    Column("source", lambda item: item.source),
    Column("what", lambda item: item.what),
    Column("about", lambda item: item.about, rank=ID),
    Column("detail", lambda item: item.detail, rank=EXTRA),
]


@command(app, "evidence", example="penstock evidence cor_01k9z3v5x7y9a1b3c5d7e9f1g3")
def evidence(
    session: Session,
    correlation_id: Annotated[
        str, typer.Argument(help="As in an answer's X-Correlation-Id header, an error, an event or an audit row.")
    ],
    logs: Annotated[
        Path | None,
        typer.Option("--logs", help="A folder of process logs (*.log); default: those of the local cloud."),
    ] = None,
) -> None:
    """Gather audit, events, node tasks, saga history and logs of one request; operators only."""
    with session.client() as client:
        found = client.audit.evidence(correlation_id)
    lines = list(_log_lines(_log_folder(session, logs), correlation_id))
    for what in found.missing:
        notice(f"missing: {what}")
    if session.output.format is Format.JSON:
        import msgspec

        session.output.json(msgspec.to_builtins(found) | {"logs": lines})
        return
    session.output.items(sorted([*_items(found), *map(_of_line, lines)], key=lambda item: item.at), COLUMNS)


def _log_folder(session: Session, given: Path | None) -> Path | None:
    if given is not None:
        if not given.is_dir():
            raise CliError(f"{given} is not a folder", field="logs")
        return given
    folder = data_folder(session.flags.data, session.environ) / "log"
    if not folder.is_dir():
        notice("missing: logs: they are not on this machine; give their folder with --logs, or ask your log store")
        return None
    return folder


def _log_lines(folder: Path | None, correlation_id: str) -> Iterator[dict[str, Any]]:
    wanted = correlation_id.encode()
    count = 0
    for file in sorted(folder.glob("*.log")) if folder else ():
        with file.open("rb") as lines:
            for text in lines:
                if wanted in text and (line := _parse(text, correlation_id)) is not None:
                    yield {"process": file.stem, **line}
                    count += 1
                    if count >= _LINES_MAX:
                        notice(f"missing: logs after the first {_LINES_MAX} lines")
                        return


def _parse(text: bytes, correlation_id: str) -> dict[str, Any] | None:
    try:
        line: Any = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and line.get("correlation_id") == correlation_id else None


def _items(found: Evidence) -> Iterator[Item]:
    for entry in found.audit:
        yield Item(entry.at, "audit", entry.action, entry.target_id, f"by {entry.actor_id} {_json(entry.detail)}")
    for event in found.events:
        yield Item(event.occurred_at, "event", event.event_type, event.aggregate_id, _json(event.payload))
    for task in found.tasks:
        yield Item(task.created_at, "task", f"{task.type} asked", task.node_id, task.id)
        if task.finished_at:
            detail = f"{task.id} {task.error_code} {task.detail}".strip()
            yield Item(task.finished_at, "task", f"{task.type} {task.state}", task.node_id, detail)
    for row in found.ledger:
        yield Item(row.at, "ledger", f"{row.kind} {row.amount_microusd:+} µ$", row.account_id, row.transfer_id)
    for charge in found.charges:
        seconds = charge.quantity / 1e6
        detail = f"{seconds:g} s, {charge.amount_microusd} µ$"
        yield Item(charge.until_at, "charge", f"charged for {charge.day}", charge.allocation_id, detail)
    for step in found.sagas:
        yield Item(step.at, "saga", step.what, step.allocation_id, step.detail)


def _of_line(line: Mapping[str, Any]) -> Item:
    try:
        at = datetime.fromisoformat(str(line.get("timestamp")))
    except ValueError:
        at = datetime.fromtimestamp(0, UTC)
    # Other log stores may leave out that it is UTC.
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    rest = {name: value for name, value in line.items() if name not in (*_NAMED, "process")}
    return Item(at, "log", str(line.get("event", "")), str(line["process"]), _json(rest))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)

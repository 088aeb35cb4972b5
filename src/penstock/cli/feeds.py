"""What happened: events and dead letters."""

import json
import sys
from typing import Annotated

import typer

from penstock.cli.many import say_each
from penstock.cli.output import EXTRA, ID, NEEDED, Column, Format
from penstock.cli.session import Session, command, group
from penstock.cli.text import cell, clean, csv_cell
from penstock.wire.rest import DeadLetterOut, EventOut

app = group("feed", "What happened.")
dead_letters = group("dead-letters", "Events that the broker refused for good; operators only.")

EVENT_COLUMNS: list[Column[EventOut]] = [
    Column("at", lambda event: event.occurred_at),
    Column("type", lambda event: event.event_type, rank=NEEDED),
    Column("aggregate", lambda event: event.aggregate_id, rank=ID),
    Column("version", lambda event: event.version),
    Column("payload", lambda event: json.dumps(event.payload, ensure_ascii=False), rank=EXTRA),
]
DEAD_LETTER_COLUMNS: list[Column[DeadLetterOut]] = [
    Column("event", lambda letter: letter.event_id, rank=ID),
    Column("type", lambda letter: letter.event_type),
    Column("aggregate", lambda letter: letter.aggregate_id),
    Column("version", lambda letter: letter.version),
    Column("attempts", lambda letter: letter.attempts),
    Column("error", lambda letter: letter.last_error, rank=EXTRA),
]

Limit = Annotated[int, typer.Option(min=1, help="How many at most.")]


@command(app, "events", example="penstock events --follow -o json")
def events(
    session: Session,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Print events as they happen, until Ctrl-C.")] = False,
    after: Annotated[str | None, typer.Option(help="With --follow: start after this cursor.")] = None,
    event_type: Annotated[str | None, typer.Option("--type", help="Only events of this type.")] = None,
    aggregate: Annotated[str | None, typer.Option(help="Only events of this object.")] = None,
    limit: Limit = 100,
) -> None:
    """Show the newest events of the project, the last one last."""
    with session.client() as client:
        if follow:
            for event in client.events.follow(after=after, event_type=event_type, aggregate_id=aggregate):
                _print_now(session, event)
        newest = client.events.list(event_type=event_type, aggregate_id=aggregate, newest_first=True, limit=limit)
        session.output.items(reversed(list(newest)), EVENT_COLUMNS)


def _print_now(session: Session, event: EventOut) -> None:
    if session.output.format is Format.JSON:
        session.output.json_line(event)
        return
    cells = [cell(column.read(event)) for column in EVENT_COLUMNS]
    if session.output.format is Format.CSV:
        import csv

        csv.writer(sys.stdout, lineterminator="\n").writerow(map(csv_cell, cells))
    else:
        session.output.line("  ".join(map(clean, cells)))
    sys.stdout.flush()


@command(dead_letters, "list", example="penstock dead-letters list")
def list_(session: Session, limit: Limit = 100) -> None:
    """List them."""
    with session.client() as client:
        session.output.items(client.dead_letters.list(limit=limit), DEAD_LETTER_COLUMNS)


@command(dead_letters, "requeue", example="penstock dead-letters requeue evt_01k9z3v5x7y9a1b3c5d7e9f1g3")
def requeue(
    session: Session,
    events: Annotated[list[str], typer.Argument(metavar="EVENT…", help="The events' ids (evt_…).")],
) -> None:
    """Publish events again."""
    with session.client() as client:

        def requeue(text: str) -> str:
            client.dead_letters.requeue(text)
            return f"requeued event {text}"

        say_each(session, events, requeue)


@command(dead_letters, "discard", example="penstock dead-letters discard evt_01k9z3v5x7y9a1b3c5d7e9f1g3")
def discard(
    session: Session,
    events: Annotated[list[str], typer.Argument(metavar="EVENT…", help="The events' ids (evt_…).")],
) -> None:
    """Give events up."""
    with session.client() as client:

        def discard(text: str) -> str:
            client.dead_letters.discard(text)
            return f"discarded event {text}"

        say_each(session, events, discard)

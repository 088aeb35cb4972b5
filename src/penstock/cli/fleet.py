"""The fleet at a glance, live; and what is stuck."""

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import EXTRA, ID, Column, Format, notice, terminal_chars
from penstock.cli.session import Session, command, group
from penstock.cli.tables import lay_out
from penstock.cli.text import cell, clean
from penstock.wire.rest import FleetOverview, NodeLoad, Problem

if TYPE_CHECKING:
    from rich.console import RenderableType

app = group("fleet", "The fleet at a glance, and what is stuck.")

NODE_COLUMNS: list[Column[NodeLoad]] = [
    Column("node", lambda node: node.name),
    Column("id", lambda node: node.id, rank=ID),
    Column("state", lambda node: node.state + (" (simulated)" if node.simulated else "")),
    Column("gpus used", lambda node: f"{node.gpus_used}/{node.gpus_total}"),
    Column("slots used", lambda node: f"{node.slots_used}/{node.slots_total}"),
    Column("unusable", lambda node: node.gpus_unusable or None),
    Column("units", lambda node: node.units),
    Column("heartbeat", lambda node: None if node.heartbeat_age_s is None else f"{node.heartbeat_age_s:.0f} s ago"),
    Column("agent", lambda node: node.agent_version),
    Column("release at", lambda node: node.release_at),
]
PROBLEM_COLUMNS: list[Column[Problem]] = [
    Column("kind", lambda problem: problem.kind),
    Column("id", lambda problem: problem.id, rank=ID),
    Column("since", lambda problem: problem.since),
    Column("reason", lambda problem: problem.reason, rank=EXTRA),
    Column("what to do", lambda problem: problem.repair),
]


@command(app, "top", example="penstock fleet top --every 2")
def top(
    session: Session,
    every: Annotated[float, typer.Option(min=0.5, max=3600, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once; the default where output is no terminal.")] = False,
    nodes: Annotated[int, typer.Option(min=0, max=2000, help="How many nodes to list.")] = 30,
) -> None:
    """Show nodes, GPUs and allocations, and keep showing them until Ctrl-C."""
    with session.client() as client:
        if once or session.output.format is not Format.TABLE or not sys.stdout.isatty():
            _print(session, client.fleet.overview(nodes_max=nodes))
            return
        from rich.live import Live

        with Live(_screen(client.fleet.overview(nodes_max=nodes)), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(_screen(client.fleet.overview(nodes_max=nodes)), refresh=True)


def _print(session: Session, found: FleetOverview) -> None:
    if session.output.format is Format.JSON:
        session.output.json(found)
        return
    if session.output.format is Format.TABLE:
        for line in _summary(found):
            session.output.line(clean(line))
        session.output.line("")
    session.output.items(found.node_list, NODE_COLUMNS)


def _summary(found: FleetOverview) -> list[str]:
    states = ", ".join(f"{count} {state}" for state, count in found.nodes.items()) or "none"
    allocations = ", ".join(f"{count} {state}" for state, count in found.allocations.items()) or "none"
    lines = [f"{cell(found.at)}   nodes: {states}   allocations: {allocations}"]
    return lines + [
        f"{gpus.model}: {gpus.used} of {gpus.total} used, {gpus.free} free"
        + (f", {gpus.unusable} unusable" if gpus.unusable else "")
        + (f"; {gpus.slots_free} of {gpus.slots_total} slots free" if gpus.slots_total != gpus.total else "")
        for gpus in found.gpus
    ]


def _screen(found: FleetOverview) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    rows = [[clean(cell(column.read(node))) for column in NODE_COLUMNS] for node in found.node_list]
    ranks = [column.rank for column in NODE_COLUMNS]
    heading, *lines = lay_out([column.title for column in NODE_COLUMNS], rows, ranks, terminal_chars())[0]
    summary = [Text(clean(line)) for line in _summary(found)]
    return Group(*summary, Text(""), Text(heading, style="bold"), *map(Text, lines))


@command(app, "problems", example="penstock fleet problems -o json")
def problems(session: Session) -> None:
    """List what does not get on by itself, with the reason and the command that repairs it."""
    with session.client() as client:
        found = list(client.fleet.problems())
    if session.output.format is Format.TABLE and sys.stdout.isatty():
        # Reasons and commands are too long for a line, and commands are there to be copied.
        for problem in found:
            session.output.item(problem, PROBLEM_COLUMNS)
            session.output.line("")
    else:
        session.output.items(found, PROBLEM_COLUMNS)
    if not found and session.output.format is Format.TABLE:
        notice("nothing is stuck")

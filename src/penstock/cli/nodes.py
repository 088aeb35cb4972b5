"""GPU hosts, for operators."""

import shlex
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli import completing, gpus, names
from penstock.cli.errors import CliError
from penstock.cli.many import Done, each
from penstock.cli.output import EXTRA, ID, NEEDED, Column, Format, notice
from penstock.cli.progress import progress
from penstock.cli.session import Session, command, group
from penstock.cli.text import cell, seconds, size
from penstock.wire.rest import EnrolmentToken, Node, NodeGpu, Task

if TYPE_CHECKING:
    from penstock.sdk.client import Client

app = group("node", "GPU hosts: enrol them and look after them.")
app.add_typer(gpus.app)

COLUMNS: list[Column[Node]] = [
    Column("id", lambda node: node.id, rank=ID),
    Column("name", lambda node: node.name, rank=NEEDED),
    Column("state", lambda node: node.state, rank=NEEDED),
    Column("gpus free", lambda node: f"{node.gpus_free}/{node.gpus_total}"),
    Column("slots free", lambda node: f"{node.slots_free}/{node.slots_total}"),
    Column("simulated", lambda node: node.simulated),
    Column("last heartbeat", lambda node: node.last_heartbeat_at),
    Column("release at", lambda node: node.release_at),
    Column("reason", lambda node: node.state_reason, rank=EXTRA),
]
DETAIL_COLUMNS: list[Column[Node]] = [
    *COLUMNS,
    Column("functions", lambda node: node.serves_functions),
    Column("agent", lambda node: node.agent_version),
    Column("labels", lambda node: node.labels),
    Column("certificate expires", lambda node: node.certificate_expires_at),
    Column("created", lambda node: node.created_at),
]


def share(gpu: NodeGpu) -> str:
    """How much of a GPU a slot is; empty for a whole one."""
    return {"mig": gpu.profile, "mps": f"mps {gpu.threads_percent} %"}.get(gpu.kind, "")


GPU_COLUMNS: list[Column[NodeGpu]] = [
    Column("gpu", lambda gpu: gpu.index),
    Column("slot", lambda gpu: gpu.slot_id, rank=ID),
    Column("model", lambda gpu: gpu.model + (" (simulated)" if gpu.simulated else "")),
    Column("share", share),
    Column("memory", lambda gpu: size(gpu.memory_bytes)),
    Column("health", lambda gpu: gpu.health),
    Column("detail", lambda gpu: gpu.health_detail, rank=EXTRA),
    *gpus.READING_COLUMNS,
    Column("allocation", lambda gpu: gpu.allocation_id),
]
TASK_COLUMNS: list[Column[Task]] = [
    Column("id", lambda task: task.id, rank=ID),
    Column("type", lambda task: task.type),
    Column("state", lambda task: task.state, rank=NEEDED),
    Column("allocation", lambda task: task.allocation_id),
    Column("attempts", lambda task: task.attempts),
    Column("error", lambda task: task.error_code, rank=EXTRA),
    Column("detail", lambda task: task.detail, rank=EXTRA),
    Column("created", lambda task: task.created_at),
    Column("finished", lambda task: task.finished_at),
]

_DRAIN_LOOK_S: Final = 2.0

NodeName = Annotated[
    str, typer.Argument(metavar="NODE", help="The node's name or id (nod_…).", autocompletion=completing.nodes)
]
NodeNames = Annotated[
    list[str],
    typer.Argument(metavar="NODE…", help="The nodes' names or ids (nod_…).", autocompletion=completing.nodes),
]
STATES: Final = ("pending", "enrolled", "ready", "cordoned", "draining", "unreachable", "lost", "retired")
Reason = Annotated[str, typer.Option(help="Why; shown on the node and in the audit log.")]


@command(app, "enroll", example="penstock node enroll rack1-host7")
def enroll(
    session: Session,
    name: Annotated[str, typer.Argument(help="What the node will be called.")],
    gpus: Annotated[int, typer.Option(help="How many GPUs it may bring at most.")] = 1024,
) -> None:
    """Make a single-use token and print the command to run on the host."""
    with session.client() as client:
        _print_token(session, client.nodes.enrolment_token(name, gpus_approved=gpus))


@command(app, "recover", example="penstock node recover rack1-host7")
def recover(session: Session, node: NodeName) -> None:
    """Make a token for a node whose certificate was lost, and print the command to run on it."""
    with session.client() as client:
        _print_token(session, client.nodes.recovery_token(names.node(client, node)))


def _print_token(session: Session, token: EnrolmentToken) -> None:
    if session.output.format is Format.JSON:
        session.output.json(token)
        return
    if unreachable := _loopback_address(token.command):
        notice(f"the API listens at {unreachable}, which no other host reaches; `penstock up --address A` listens at A")
    notice(f"run this on the host {token.node_name} before {token.expires_at:%H:%M:%S} UTC; the token works once:")
    session.output.line(token.command)


def _loopback_address(command: str) -> str:
    """The API's address in the command of a node that joins, if it is one of this machine alone."""
    from penstock.sdk.target import is_loopback

    words = shlex.split(command)
    address = words[words.index("--api") + 1] if "--api" in words[:-1] else ""
    return address if is_loopback(address) else ""


@command(app, "list", example="penstock node list --state ready")
def list_(
    session: Session,
    state: Annotated[
        str | None,
        typer.Option(help="Only in this state; default: all but retired.", autocompletion=completing.words(*STATES)),
    ] = None,
) -> None:
    """List nodes."""
    with session.client() as client:
        session.output.items(client.nodes.list(state=state), COLUMNS)


@command(app, "show", example="penstock node show rack1-host7")
def show(session: Session, node: NodeName) -> None:
    """Show a node and its GPUs."""
    with session.client() as client:
        found = client.nodes.get(names.node(client, node))
    session.output.item(found, DETAIL_COLUMNS)
    if session.output.format is Format.TABLE and found.gpus:
        session.output.line("")
        session.output.items(found.gpus, GPU_COLUMNS)


@command(app, "tasks", example="penstock node tasks rack1-host7 --limit 20")
def tasks(session: Session, node: NodeName, limit: Annotated[int, typer.Option(min=1, help="How many.")] = 100) -> None:
    """List what a node was asked to do."""
    with session.client() as client:
        session.output.items(client.nodes.tasks(names.node(client, node), limit=limit), TASK_COLUMNS)


@command(app, "cordon", example="penstock node cordon rack1-host7 --reason 'new driver'")
def cordon(session: Session, nodes: NodeNames, reason: Reason = "") -> None:
    """Place nothing new on nodes."""
    _change(session, nodes, lambda client, node_id: client.nodes.cordon(node_id, reason=reason))


@command(app, "uncordon", example="penstock node uncordon rack1-host7")
def uncordon(session: Session, nodes: NodeNames, reason: Reason = "") -> None:
    """Place on nodes again."""
    _change(session, nodes, lambda client, node_id: client.nodes.uncordon(node_id, reason=reason))


@command(app, "drain", example="penstock node drain rack1-host7 --grace 2h --wait")
def drain(
    session: Session,
    nodes: NodeNames,
    grace: Annotated[str, typer.Option(help="How long what runs there may go on, such as 90s, 30m, 2h or 1d.")] = "0s",
    wait: Annotated[bool, typer.Option("--wait", help="Return when nothing is left on the node.")] = False,
    reason: Reason = "",
) -> None:
    """Place nothing new on nodes, and release what still runs there after the grace."""
    grace_s = seconds(grace, field="grace")
    with session.client() as client:
        done = each(
            session,
            nodes,
            lambda text: client.nodes.drain(names.node(client, text), grace_s=grace_s, reason=reason),
        )
        if wait:
            done.values = [_drained(client, node) for node in done.values]
        _show(session, done)


def _drained(client: "Client", node: Node) -> Node:
    """The node when nothing is left on it."""
    if not (held := _held(client, node)):
        return client.nodes.get(node.id)
    with progress(held) as report:
        while held := _held(client, node):
            report(held)
            time.sleep(_DRAIN_LOOK_S)
    return client.nodes.get(node.id)


def _held(client: "Client", node: Node) -> str:
    """How many GPUs of a node are in use; empty for none."""
    held = {gpu.gpu_uuid for gpu in client.nodes.get(node.id).gpus if gpu.allocation_id}
    until = f", until {cell(node.release_at)}" if node.release_at else ""
    return f"GPUs of {node.name} still held: {len(held)}{until}" if held else ""


@command(app, "revoke", example="penstock node revoke rack1-host7 --reason stolen")
def revoke(session: Session, nodes: NodeNames, reason: Reason = "") -> None:
    """Take nodes' certificates away: they are out within seconds."""
    _change(session, nodes, lambda client, node_id: client.nodes.revoke(node_id, reason=reason))


@command(app, "retire", example="penstock node retire rack1-host7")
def retire(session: Session, nodes: NodeNames, reason: Reason = "") -> None:
    """Remove nodes for good."""
    _change(session, nodes, lambda client, node_id: client.nodes.retire(node_id, reason=reason))


@command(
    app,
    "force-cleanup",
    example="penstock node force-cleanup rack1-host7 slt_01k9z3v5x7y9a1b3c5d7e9f1g3 --verified",
)
def force_cleanup(
    session: Session,
    node: NodeName,
    slot_id: Annotated[str, typer.Argument(help="The slot's id (slt_…), from `penstock node show`.")],
    verified: Annotated[
        bool, typer.Option("--verified", help="You have looked: nothing of the last tenant is left.")
    ] = False,
    reason: Reason = "",
) -> None:
    """Give back a slot whose cleanup could not be proved."""
    if not verified:
        raise CliError("look at the node first, then say --verified", field="verified")
    with session.client() as client:
        session.output.item(client.nodes.force_cleanup(names.node(client, node), slot_id, reason=reason), GPU_COLUMNS)


def _change(session: Session, nodes: Sequence[str], change: "Callable[[Client, str], Node]") -> None:
    with session.client() as client:
        _show(session, each(session, nodes, lambda text: change(client, names.node(client, text))))


def _show(session: Session, done: Done[Node]) -> None:
    if done.many:
        session.output.items(done.values, COLUMNS)
    else:
        session.output.item(done.values[0], COLUMNS)
    done.end()

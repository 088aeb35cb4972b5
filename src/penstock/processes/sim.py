"""`penstock sim`: many simulated nodes in one process, enrolled through the API like any host. Composition root.

Identities are kept in a folder, so that the next start takes the same nodes up again; one that the control plane no
longer knows, or has given up, is enrolled anew.
"""

import asyncio
import re
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Final, TypeVar

import aiohttp
import msgspec
import typer
import uvloop
from prometheus_client import REGISTRY

from penstock.cli.errors import CONFLICT, SERVER, CliError
from penstock.cli.local import data_folder
from penstock.cli.output import Column
from penstock.cli.progress import progress
from penstock.cli.session import Session, command, group
from penstock.kit import dialling, process, telemetry
from penstock.kit.clock import utc_now
from penstock.kit.errors import PenstockError
from penstock.node import identity, simulation
from penstock.node.errors import NodeError
from penstock.node.identity import Identity
from penstock.node.simulation import SimulatedNode
from penstock.sdk.client import AsyncClient
from penstock.sdk.errors import ApiError
from penstock.wire.rest import EnrolmentToken, Node
from penstock.wire.tasks import SignedTask
from penstock.wire.unreadable import UNREADABLE

NODES_MAX: Final = 10_000
_NAME: Final = re.compile(r"sim-\d{4,5}")
#: Requests at once: the API has other callers.
_AT_ONCE: Final = 8
_RENEW_LOOK_S: Final = 30.0
_FIRST: Final = asyncio.FIRST_COMPLETED

Report = Callable[[str], None]
T = TypeVar("T")


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated, and how."""

    nodes: int
    gpus: int = 8
    task_s: float = 0.05
    duration_s: float = 0.0
    tunnels: bool = False


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """How the simulated nodes do, or did."""

    nodes: int
    connected: int
    connects: int
    heartbeats: int
    tasks: int
    seconds: float

    def line(self, before: "Summary") -> str:
        """One line for people; the rate is since `before`."""
        passed_s = max(0.001, self.seconds - before.seconds)
        rate = (self.heartbeats - before.heartbeats) / passed_s
        return (
            f"simulated: {self.connected}/{self.nodes} connected, {rate:.0f} heartbeats/s, {self.tasks} tasks done, "
            f"{max(0, self.connects - self.nodes)} reconnects"
        )


class Enroller:
    """Makes hosts that are none into nodes."""

    def __init__(self, client: AsyncClient, *, api_url: str, folder: Path, gpus: int) -> None:
        self._client = client
        self._api_url = api_url
        self._folder = folder
        self._gpus = gpus

    async def all(self, count: int, report: Report) -> list[Identity]:
        """Identities of sim-0001 to sim-<count>."""
        known = await simulated_nodes(self._client)
        names = [f"sim-{number:04}" for number in range(1, count + 1)]

        async def one(name: str) -> Identity:
            return await self._one(name, known.get(name))

        return await _few_at_once([lambda name=name: one(name) for name in names], "nodes have an identity", report)

    async def _one(self, name: str, node: Node | None) -> Identity:
        folder = self._folder / name
        kept = await asyncio.to_thread(identity.load, folder)
        if kept and node and kept.node_id == node.id and node.state != "lost" and identity.usable(kept):
            return kept
        token = await self._token(name, node)
        return await identity.enrol(folder, api_url=self._api_url, token=token.token, node_name=name)

    async def _token(self, name: str, node: Node | None) -> EnrolmentToken:
        if node is None or node.state == "pending":
            return await self._client.nodes.enrolment_token(name, gpus_approved=self._gpus)
        return await self._client.nodes.recovery_token(node.id)


async def simulated_nodes(client: AsyncClient) -> dict[str, Node]:
    """Nodes by name, as far as they are called like simulated ones and were never anything else."""
    found: dict[str, Node] = {}
    async for node in client.nodes.list():
        fresh = node.state in ("pending", "enrolled")
        if _NAME.fullmatch(node.name) and node.state != "retired" and (node.simulated or fresh):
            found[node.name] = node
    return found


async def clean_up(client: AsyncClient, report: Report) -> tuple[int, int]:
    """Retire all simulated nodes; how many are gone, and how many are held by allocations."""
    nodes = await simulated_nodes(client)

    async def retire(node: Node) -> bool:
        try:
            await client.nodes.retire(node.id, reason="the simulation was cleaned up")
        except ApiError as error:
            if error.code != "fleet.node_in_use":
                raise
            return False
        return True

    gone = await _few_at_once([lambda node=node: retire(node) for node in nodes.values()], "nodes retired", report)
    return sum(gone), len(gone) - sum(gone)


async def _few_at_once(calls: Sequence[Callable[[], Awaitable[T]]], what: str, report: Report) -> list[T]:
    """Their results in order; how far it is, is reported now and then."""
    turn, done = asyncio.Semaphore(_AT_ONCE), 0

    async def one(call: Callable[[], Awaitable[T]]) -> T:
        nonlocal done
        async with turn:
            result = await call()
        done += 1
        if done % max(1, len(calls) // 4) == 0 or done == len(calls):
            report(f"simulated: {done}/{len(calls)} {what}")
        return result

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(call)) for call in calls]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


class Fleet:
    """Simulated nodes at work."""

    def __init__(
        self,
        identities: Sequence[Identity],
        wanted: Wanted,
        on_task: Callable[[SignedTask], None] = lambda _: None,
    ) -> None:
        self._tunnels = wanted.tunnels
        self.nodes = [SimulatedNode(who, gpus=wanted.gpus, task_s=wanted.task_s, on_task=on_task) for who in identities]
        self._began = time.monotonic()

    def summary(self) -> Summary:
        """As of now."""
        return Summary(
            nodes=len(self.nodes),
            connected=sum(node.link.standing for node in self.nodes),
            connects=_count("penstock_node_link_connects"),
            heartbeats=_count("penstock_node_heartbeats"),
            tasks=_count("penstock_node_tasks"),
            seconds=time.monotonic() - self._began,
        )

    async def run(self) -> None:
        """Keep all links standing until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(simulation.run(self.nodes, tunnels=self._tunnels))
            group.create_task(process.every(_RENEW_LOOK_S, self._renew, name="renew"))

    async def _renew(self) -> None:
        now = utc_now()
        due = [node for node in self.nodes if now >= node.who.renew_at]
        if not due:
            return
        async with aiohttp.ClientSession(connector=dialling.connector()) as session:
            for node in due:
                try:
                    await node.who.renew(session)
                except (OSError, aiohttp.ClientError, TimeoutError, NodeError, PenstockError, *UNREADABLE):
                    continue
                node.link.reconnect()


def _count(name: str) -> int:
    """What a counter of this process shows, whatever its labels."""
    return sum(
        int(sample.value)
        for family in REGISTRY.collect()
        if family.name == name
        for sample in family.samples
        if sample.name == f"{name}_total"
    )


async def serve(fleet: Fleet, *, duration_s: float, every_s: float, report: Report) -> Summary:
    """Run the nodes for so long, or until a signal comes when it is 0; how they did when they ended."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    running, stopping = asyncio.create_task(fleet.run()), asyncio.create_task(stop.wait())
    ends_at = loop.time() + duration_s if duration_s else float("inf")
    before = fleet.summary()
    while not stop.is_set() and not running.done() and loop.time() < ends_at:
        await asyncio.wait([stopping, running], timeout=min(every_s, ends_at - loop.time()), return_when=_FIRST)
        now = fleet.summary()
        report(now.line(before))
        before = now
    for task in (running, stopping):
        task.cancel()
    await asyncio.wait([running, stopping])
    if not running.cancelled() and (error := running.exception()):
        raise error
    return before


app = group("sim", "Simulated nodes, for trying a fleet on one machine.")


@command(app, "nodes", example="penstock sim nodes 1000 --gpus 8")
def nodes(
    session: Session,
    count: Annotated[int, typer.Argument(min=1, max=NODES_MAX, help="How many nodes.")] = 100,
    *,
    gpus: Annotated[int, typer.Option(min=0, max=1024, help="Simulated GPUs of each.")] = 8,
    duration: Annotated[float, typer.Option(min=0, help="Seconds until the end; 0 runs until Ctrl-C.")] = 0.0,
    task_ms: Annotated[float, typer.Option(min=0, max=600_000, help="How long each task takes.")] = 50.0,
    tunnels: Annotated[bool, typer.Option("--tunnels", help="Also keep a tunnel of each node open.")] = False,
    cleanup: Annotated[bool, typer.Option("--cleanup", help="Retire all simulated nodes, and end.")] = False,
) -> None:
    """Run simulated nodes: real links and certificates, pretended units. Their identities are kept for the next run."""
    wanted = Wanted(nodes=count, gpus=gpus, task_s=task_ms / 1000, duration_s=duration, tunnels=tunnels)
    telemetry.configure("sim", level="error", log_format="text")
    process.allow_many_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, progress("simulated nodes") as report:
        done = runner.run(_clean_up(session, report) if cleanup else _simulate(session, wanted, report))
    if isinstance(done, Summary):
        session.output.item(done, _COLUMNS)


async def _clean_up(session: Session, report: Report) -> None:
    target = session.target()
    async with AsyncClient(**target) as client:
        gone, held = await clean_up(client, report)
    await asyncio.to_thread(shutil.rmtree, _identities(session), ignore_errors=True)
    if held:
        raise CliError(f"{held} simulated nodes are held by allocations; release these first", exit_code=CONFLICT)
    report(f"simulated: {gone} nodes retired")


async def _simulate(session: Session, wanted: Wanted, report: Report) -> Summary:
    target = session.target()
    async with AsyncClient(**target) as client:
        enroller = Enroller(client, api_url=target["api_url"], folder=_identities(session), gpus=wanted.gpus)
        try:
            identities = await enroller.all(wanted.nodes, report)
        except (PenstockError, aiohttp.ClientError, OSError, TimeoutError) as error:
            raise CliError(f"cannot enrol: {error}", code="enrolment", exit_code=SERVER) from error
    fleet = Fleet(identities, wanted)
    every_s = 1.0 if sys.stderr.isatty() else 5.0
    return await serve(fleet, duration_s=wanted.duration_s, every_s=every_s, report=report)


def _identities(session: Session) -> Path:
    return data_folder(session.flags.data, session.environ) / "sim"


_COLUMNS: Final[Sequence[Column[Summary]]] = (
    Column("nodes", lambda summary: summary.nodes),
    Column("connected", lambda summary: summary.connected),
    Column("connects", lambda summary: summary.connects),
    Column("heartbeats", lambda summary: summary.heartbeats),
    Column("tasks", lambda summary: summary.tasks),
    Column("seconds", lambda summary: round(summary.seconds, 1)),
)

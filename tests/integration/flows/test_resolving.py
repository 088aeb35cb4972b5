"""Requirements become a lock: a node is asked, another one if it cannot, and the answer is kept."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from integration.compute.stage import World, someone
from integration.flows.fakenode import Answer, FakeNode
from penstock.compute.errors import TooManyResolutions
from penstock.compute.model import Resolution, ResolutionState
from penstock.compute.service import resolutions
from penstock.compute.service.resolutions import OPEN_MAX, Wanted
from penstock.fleet import pki
from penstock.fleet.pki import TaskSigner
from penstock.fleet.tasks import Tasks
from penstock.flows.resolving import Resolving
from penstock.kit.bus import Bus
from penstock.wire import locks
from penstock.wire.tasks import RESOLUTIONS_MAX, Outcome, RuntimeResolved, TaskBody

LOCK = f"tiny==1.0 --hash=sha256:{'a' * 64}\n"
GOOD = RuntimeResolved(lock=locks.pack(LOCK), python="3.11", seconds=0.1)
Before = Callable[[TaskBody], Awaitable[Answer | None]]


def answers(*each: Answer) -> Before:
    rest = list(each)

    async def answer(_: TaskBody) -> Answer | None:
        return rest.pop(0) if len(rest) > 1 else rest[0]

    return answer


async def ask(world: World, text: str = "tiny\n", *, upgrade: bool = False, project: str | None = None) -> Resolution:
    caller = someone() if project is None else replace(someone(), project_id=project)
    async with world.db.transaction() as tx:
        return await resolutions.request(tx, caller, Wanted("python:3", text), upgrade=upgrade)


async def look(world: World, asked: Resolution) -> Resolution:
    async with world.db.read() as conn:
        return await resolutions.get(conn, someone(), asked.id)


@pytest.fixture
def resolving(world: World, tmp_path_factory: pytest.TempPathFactory) -> Resolving:
    folder = tmp_path_factory.mktemp("pki")
    pki.init(folder, ["127.0.0.1"])
    return Resolving(world.db, Tasks(TaskSigner.load(folder)))


async def settled(world: World, resolving: Resolving, asked: Resolution) -> Resolution:
    async with asyncio.timeout(20):
        while (row := await look(world, asked)).finished_at is None:
            await resolving.sweep()
            await asyncio.sleep(0.02)
    return row


async def test_a_node_is_asked_and_its_lock_kept_until_an_upgrade(
    world: World, resolving: Resolving, nats_bus: Bus
) -> None:
    node = FakeNode(world.db, await world.add_node(1))
    newer = RuntimeResolved(lock=locks.pack(LOCK.replace("1.0", "2.0")), python="3.11", seconds=0.1)
    node.before = answers((Outcome.SUCCEEDED, GOOD, ""), (Outcome.SUCCEEDED, newer, ""))
    async with node.running(nats_bus):
        first = await settled(world, resolving, await ask(world))
        assert (first.state, first.lock, first.python) == (ResolutionState.SUCCEEDED, LOCK, "3.11")
        assert (await ask(world)).id == first.id
        upgraded = await settled(world, resolving, await ask(world, upgrade=True))
        assert (upgraded.id != first.id, upgraded.lock) == (True, LOCK.replace("1.0", "2.0"))
        assert (await ask(world)).id == upgraded.id


async def test_what_cannot_be_resolved_is_said_and_may_be_tried_again(
    world: World, resolving: Resolving, nats_bus: Bus
) -> None:
    node = FakeNode(world.db, await world.add_node(1))
    node.before = answers((Outcome.FAILED, None, "nosuch was not found"))
    async with node.running(nats_bus):
        row = await settled(world, resolving, await ask(world, "nosuch\n"))
    assert (row.state, row.error) == (ResolutionState.FAILED, "nosuch was not found")
    assert (await ask(world, "nosuch\n")).id != row.id


async def test_a_node_that_refuses_is_not_the_last_one(world: World, resolving: Resolving, nats_bus: Bus) -> None:
    first = FakeNode(world.db, await world.add_node(1))
    second = FakeNode(world.db, await world.add_node(1))
    asked: list[str] = []

    def refusing_first(node: FakeNode) -> Before:
        async def answer(_: TaskBody) -> Answer:
            asked.append(node.node_id)
            return (Outcome.REFUSED, None, "simulated") if len(asked) == 1 else (Outcome.SUCCEEDED, GOOD, "")

        return answer

    for node in (first, second):
        node.before = refusing_first(node)
    async with first.running(nats_bus), second.running(nats_bus):
        row = await settled(world, resolving, await ask(world))
    assert row.state is ResolutionState.SUCCEEDED
    assert sorted(asked) == sorted({first.node_id, second.node_id})


async def test_a_lock_that_is_none_is_not_taken_from_a_node(world: World, resolving: Resolving, nats_bus: Bus) -> None:
    node = FakeNode(world.db, await world.add_node(1))
    evil = RuntimeResolved(lock=locks.pack("--index-url https://evil.example\n"), python="3.11", seconds=0.1)
    node.before = answers((Outcome.SUCCEEDED, evil, ""))
    async with node.running(nats_bus):
        row = await settled(world, resolving, await ask(world))
    assert (row.state, row.error_code, row.lock) == (ResolutionState.FAILED, "bad_lock", "")


@pytest.mark.parametrize(
    ("lock", "said"),
    [
        (f"other==1.0 --hash=sha256:{'a' * 64}\n", "tiny is missing"),
        (f"tiny==9.0 --hash=sha256:{'a' * 64}\n", "tiny is 9.0, which is not <2"),
        (f"tiny==1.0 ; python_version < '3' --hash=sha256:{'a' * 64}\n", "marker leaves it out"),
    ],
)
async def test_a_lock_without_what_was_asked_for_is_not_taken_and_another_node_is_asked(
    world: World, resolving: Resolving, nats_bus: Bus, lock: str, said: str
) -> None:
    evil = RuntimeResolved(lock=locks.pack(lock), python="3.11", seconds=0.1)
    nodes = [FakeNode(world.db, await world.add_node(1)) for _ in range(2)]
    answer = answers((Outcome.SUCCEEDED, evil, ""), (Outcome.SUCCEEDED, GOOD, ""))
    for node in nodes:
        node.before = answer
    async with nodes[0].running(nats_bus), nodes[1].running(nats_bus):
        asked = await ask(world, "tiny<2\n")
        row = await settled(world, resolving, asked)
        assert (row.state, row.lock, row.error) == (ResolutionState.SUCCEEDED, LOCK, "")
        for node in nodes:
            node.before = answers((Outcome.SUCCEEDED, evil, ""))
        row = await settled(world, resolving, await ask(world, "tiny<2\n", upgrade=True))
    assert (row.state, row.error_code) == (ResolutionState.FAILED, "bad_lock")
    assert said in row.error


async def test_the_only_nodes_reason_is_shown(world: World, resolving: Resolving, nats_bus: Bus) -> None:
    node = FakeNode(world.db, await world.add_node(1), error_code="no_installer")
    node.before = answers((Outcome.FAILED, None, "uv is not installed on this node"))
    async with node.running(nats_bus):
        row = await settled(world, resolving, await ask(world))
    assert (row.state, row.error_code) == (ResolutionState.FAILED, "no_installer")
    assert row.error == "uv is not installed on this node; no other node is there to try"


async def test_projects_take_turns_and_a_node_has_only_what_it_does_at_once(
    world: World, resolving: Resolving, nats_bus: Bus
) -> None:
    """Nobody's second is asked before everybody's first."""
    node = FakeNode(world.db, await world.add_node(1), deaf=True)
    async with node.running(nats_bus):
        for number in range(26):
            for text in ("one\n", "two\n"):
                await ask(world, text, project=f"prj_{number}")
        for text in ("one\n", "two\n", "three\n"):
            await ask(world, text, project="prj_0")
        await resolving.sweep()
        running = await _running(world)
        assert (len(running), len(set(running))) == (RESOLUTIONS_MAX, RESOLUTIONS_MAX)
        for _ in range(12):
            await _end_running(world)
            await resolving.sweep()
            running += await _running(world)
    assert len(set(running)) == len(running) == 26


async def _running(world: World) -> list[str]:
    async with world.db.read() as conn:
        rows = await conn.fetch("select project_id from compute.resolutions where state = 'running'")
    return [row["project_id"] for row in rows]


async def _end_running(world: World) -> None:
    async with world.db.transaction() as tx:
        await tx.execute(
            "update fleet.tasks set state = 'failed', error_code = 'unresolvable', finished_at = now()"
            " where state in ('queued', 'leased')"
        )


async def test_an_answer_is_seen_whoever_waits_before_it(
    world: World, resolving: Resolving, nats_bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.flows.resolving._BATCH", 1)
    deaf = FakeNode(world.db, await world.add_node(1), deaf=True)
    async with deaf.running(nats_bus):
        asked = [await ask(world, text) for text in ("one\n", "tiny\n")]
        async with asyncio.timeout(20):
            while len(await _running(world)) < 2:
                await resolving.sweep()
        async with world.db.transaction() as tx:
            await tx.execute(
                "update fleet.tasks set state = 'failed', error_code = 'unresolvable', finished_at = now()"
                " where dedupe_key = $1",
                f"resolve/{asked[1].id}/0",
            )
        assert (await settled(world, resolving, asked[1])).state is ResolutionState.FAILED


async def test_without_a_node_it_waits_and_then_says_so(
    world: World, resolving: Resolving, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = await ask(world)
    await resolving.sweep()
    assert (await look(world, asked)).state is ResolutionState.QUEUED
    monkeypatch.setattr("penstock.flows.resolving._NODE_S", 0.0)
    await resolving.sweep()
    row = await look(world, asked)
    assert (row.state, row.error_code) == (ResolutionState.FAILED, "no_node")


async def test_a_project_has_a_few_under_way_at_once(world: World) -> None:
    for number in range(OPEN_MAX):
        await ask(world, f"tiny{number}\n")
    again = await ask(world, "tiny0\n", upgrade=True)
    assert again.requirements == "tiny0\n"
    with pytest.raises(TooManyResolutions):
        await ask(world, "more\n")


async def test_the_newest_that_ended_are_kept_and_all_that_are_under_way(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolutions, "KEPT_MAX", 2)
    made = {"failed": list[str](), "succeeded": list[str]()}
    under_way = await ask(world, "waits\n")
    for n in range(8):
        one = await ask(world, f"tiny=={n}\n")
        state = "failed" if n % 2 else "succeeded"
        made[state].append(one.id)
        async with world.db.transaction() as tx:
            if state == "failed":
                await resolutions.fail(tx, one, code="unresolvable", error="")
            else:
                await resolutions.succeed(tx, one, lock=LOCK, python="3.11")
    last = await ask(world, "last\n")
    async with world.db.read() as conn:
        kept = {row["id"] for row in await conn.fetch("select id from compute.resolutions")}
    assert kept == {under_way.id, last.id, *made["failed"][-2:], *made["succeeded"][-2:]}

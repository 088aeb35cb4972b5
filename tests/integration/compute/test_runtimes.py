"""Environments of a project: their names, what allocations hold on to, and when they may go."""

import pytest

from integration.compute.stage import World, someone
from integration.compute.test_routes import OneFunction
from penstock.compute.errors import BadImage, BadLock, RuntimeInUse, TooManyRuntimes, UnknownRuntime
from penstock.compute.model import Runtime, State
from penstock.compute.service import runtimes
from penstock.compute.service.advance import Advance
from penstock.compute.service.waiting import Waiting
from penstock.compute.store import runtimes as rows
from penstock.fleet import slots
from penstock.kit.caller import Caller
from penstock.kit.errors import Denied, Invalid, NotFound
from penstock.kit.ids import new_id
from penstock.wire import locks
from penstock.wire.rest import RuntimePut

ONE = f"tiny==1.0 --hash=sha256:{'a' * 64}\n"
TWO = f"tiny==2.0 --hash=sha256:{'b' * 64}\n"


async def put(world: World, name: str = "vision", lock: str = ONE, caller: Caller | None = None) -> Runtime:
    caller = caller or someone()
    recipe = await runtimes.check(caller, RuntimePut(lock=lock))
    async with world.db.transaction() as tx:
        return await runtimes.put(tx, caller, name, recipe)


async def delete(world: World, name: str = "vision", caller: Caller | None = None) -> None:
    async with world.db.transaction() as tx:
        await runtimes.delete(tx, caller or someone(), name, OneFunction())


async def lock_of(world: World, digest: str) -> str:
    async with world.db.transaction() as tx:
        found = await runtimes.lock_of(tx, digest)
    assert found is not None
    return locks.unpack(found.lock)


async def test_a_name_means_its_newest_lock_and_versions_count_changes(world: World) -> None:
    first = await put(world, lock=f"# made by hand\n{ONE}")
    assert (first.version, first.packages, first.lock, first.base) == (1, 1, ONE, "python:3")
    assert first.digest == locks.digest("python:3", ONE)
    assert (await put(world)).version == 1, "nothing changed"
    second = await put(world, lock=TWO)
    assert (second.version, second.digest) == (2, locks.digest("python:3", TWO))
    async with world.db.read() as conn:
        [shown] = await runtimes.page(conn, someone(), after="", limit=10)
        assert (shown.digest, shown.lock) == (second.digest, "")
    assert await world.value("select count(*) from kit.audit where action = 'runtimes.write'") == 3


async def test_another_project_sees_none_of_it(world: World) -> None:
    await put(world)
    stranger = someone(new_id("prj"))
    async with world.db.read() as conn:
        assert await runtimes.page(conn, stranger, after="", limit=10) == []
        with pytest.raises(NotFound):
            await runtimes.get(conn, stranger, "vision")
    with pytest.raises(NotFound):
        await delete(world, caller=stranger)
    await world.add_node(1)
    with pytest.raises(UnknownRuntime):
        await world.create(stranger, runtime="vision")
    viewer = someone(actions=frozenset({"runtimes.read"}))
    with pytest.raises(Denied):
        await put(world, lock=TWO, caller=viewer)
    with pytest.raises(Denied):
        await delete(world, caller=viewer)
    async with world.db.read() as conn:
        assert (await runtimes.get(conn, viewer, "vision")).lock == ONE


async def test_an_allocation_keeps_its_lock_when_the_name_changes_or_goes(world: World) -> None:
    await world.add_node(2)
    first = await put(world)
    made = await world.create(runtime="vision")
    assert (made.runtime, made.image) == (first.digest, "python:3")
    second = await put(world, lock=TWO)
    await delete(world)
    async with world.db.transaction() as tx:
        await tx.execute("update compute.locks set used_at = now() - interval '2 days'")
    await runtimes.sweep(world.db)
    assert await lock_of(world, made.runtime) == ONE
    async with world.db.transaction() as tx:
        assert await runtimes.lock_of(tx, second.digest) is None, "nothing refers to it"


async def test_what_is_in_use_is_not_deleted(world: World) -> None:
    await world.add_node(1)
    await put(world)
    made = await world.create(runtime="vision")
    with pytest.raises(RuntimeInUse, match=made.id):
        await delete(world)
    await put(world, "other", caller=someone(new_id("prj")))
    async with world.db.transaction() as tx:
        await tx.execute(
            "update compute.allocations set state = 'failed', deadline_at = null, ended_at = now() where id = $1",
            made.id,
        )
    await delete(world)


async def test_a_lock_that_was_just_used_is_not_swept(world: World) -> None:
    made = await put(world)
    await delete(world)
    await runtimes.sweep(world.db)
    async with world.db.transaction() as tx:
        assert await rows.lock_of(tx, made.digest) is not None


async def test_bad_input_is_named(world: World) -> None:
    await world.add_node(1)
    with pytest.raises(BadLock, match="line 1"):
        await put(world, lock="tiny==1.0")
    with pytest.raises(BadImage) as refused:
        await runtimes.check(someone(), RuntimePut(base="no such: image", lock=ONE))
    assert refused.value.field == "base"
    with pytest.raises(UnknownRuntime, match="no runtime vision"):
        await world.create(runtime="vision")
    await put(world)
    with pytest.raises(Invalid, match="python:3, the base of runtime vision"):
        await world.create(runtime="vision", image="python:3.12")


async def test_a_project_has_a_bounded_number_of_names(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "RUNTIMES_MAX", 2)
    await put(world, "one")
    await put(world, "two")
    await put(world, "two", lock=TWO)
    with pytest.raises(TooManyRuntimes):
        await put(world, "three")
    await put(world, "three", caller=someone(new_id("prj")))


async def test_provisioning_has_time_to_build(world: World) -> None:
    await world.add_node(2)
    await put(world)
    for body, extra_s in (({"runtime": "vision"}, world.limits.deadlines.runtime_s), ({}, 0)):
        made = await world.create(**body)
        async with world.db.transaction() as tx:
            begun = await Advance(slots, world.limits).begin(tx, made.id)
        assert begun is not None
        assert begun.state is State.PROVISIONING
        assert begun.deadline_at is not None
        given_s = (begun.deadline_at - begun.changed_at).total_seconds()
        assert given_s == pytest.approx(world.limits.deadlines.provisioning_s + extra_s, abs=1)


async def test_a_request_that_waits_holds_its_lock_too(world: World) -> None:
    await put(world)
    made = await world.create(runtime="vision", wait_s=60)
    with pytest.raises(RuntimeInUse):
        await delete(world)
    await world.add_node(1)
    assert await Waiting(world.db, world.limits).place_all() == 1
    assert (await world.row(made.id)).runtime == locks.digest("python:3", ONE)

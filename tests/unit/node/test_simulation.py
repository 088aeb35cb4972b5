"""What a simulated node remembers, and what it pretends."""

from datetime import UTC, datetime

import msgspec
import pytest

from penstock.node.errors import Refused
from penstock.node.inventory import Simulated
from penstock.node.journal import Standing
from penstock.node.simulation import MemoryJournal, PretendedUnits
from penstock.wire.link import TaskResult
from penstock.wire.tasks import (
    HEALTH_PROBE,
    PARAMS,
    UNIT_START,
    UNIT_STOP,
    HealthProbe,
    Limits,
    Outcome,
    SignedTask,
    TaskBody,
    UnitStart,
    UnitStop,
)

LIMITS = Limits(memory_bytes=1, processes_max=1, cpus=1, scratch_bytes=1)


def task(task_id: str, *, fence: int = 1, allocation_id: str | None = "alc_1") -> TaskBody:
    return TaskBody(
        task_id=task_id,
        node_id="nod_1",
        type=HEALTH_PROBE,
        allocation_id=allocation_id,
        fence=fence,
        expires_at=datetime.now(UTC),
        correlation_id="cor_1",
        params=msgspec.Raw(b"\x80"),
    )


SIGNED = SignedTask(body=b"", key_id="k", signature=b"")


async def test_a_repeated_task_gets_its_first_answer() -> None:
    journal = MemoryJournal()
    assert (await journal.begin(task("tsk_1"), SIGNED, expired=False)).standing is Standing.NEW
    assert (await journal.begin(task("tsk_1"), SIGNED, expired=False)).standing is Standing.UNFINISHED
    result = TaskResult(task_id="tsk_1", fence=1, outcome=Outcome.SUCCEEDED)
    await journal.finish(result)
    await journal.acknowledge("tsk_1")
    begun = await journal.begin(task("tsk_1"), SIGNED, expired=True)
    assert (begun.standing, begun.result) == (Standing.DONE, result)


async def test_lower_fences_and_expired_tasks_are_refused() -> None:
    journal = MemoryJournal()
    await journal.begin(task("tsk_1", fence=2), SIGNED, expired=False)
    assert (await journal.begin(task("tsk_2", fence=1), SIGNED, expired=False)).standing is Standing.STALE
    assert (await journal.begin(task("tsk_3", fence=2), SIGNED, expired=True)).standing is Standing.EXPIRED


async def test_what_is_remembered_is_bounded() -> None:
    journal = MemoryJournal()
    for number in range(400):
        body = task(f"tsk_{number}", allocation_id=None)
        await journal.begin(body, SIGNED, expired=False)
        await journal.finish(TaskResult(task_id=body.task_id, fence=1, outcome=Outcome.SUCCEEDED))
        await journal.acknowledge(body.task_id)
    assert (await journal.begin(task("tsk_0"), SIGNED, expired=False)).standing is Standing.NEW
    assert (await journal.begin(task("tsk_399"), SIGNED, expired=False)).standing is Standing.DONE


async def test_every_task_of_the_catalogue_is_pretended() -> None:
    units = PretendedUnits(Simulated("nod_1", 1), task_s=0)
    assert units.handlers().keys() == PARAMS.keys()


async def test_a_pretended_unit_is_reported_until_it_is_stopped_and_says_that_it_is_simulated() -> None:
    units = PretendedUnits(Simulated("nod_1", 1), task_s=0)
    handlers = units.handlers()
    await handlers[UNIT_START](UnitStart(unit_id="alc_1", image="python:3", gpu_uuids=[], limits=LIMITS))
    assert [report.unit_id for report in units.reports()] == ["alc_1"]
    assert msgspec.structs.asdict(await handlers[HEALTH_PROBE](HealthProbe()))["sandbox"] == "simulated"
    with pytest.raises(Refused, match="simulated"):
        await units.connect_port("alc_1", 80)
    proof = msgspec.structs.asdict(await handlers[UNIT_STOP](UnitStop(unit_id="alc_1", gpu_uuids=[])))
    assert proof["simulated"]
    assert units.reports() == []

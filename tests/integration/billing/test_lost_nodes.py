"""A node that is lost was gone since its last heartbeat, whatever was asked for and charged in the meantime."""

from datetime import datetime

import pytest

from integration.billing.stage import MINUTE, T0, Run, Stage
from penstock.compute.model import Limits
from penstock.compute.service.release import Release
from penstock.kit import audit

LAST_HEARTBEAT = T0 + 3 * MINUTE + MINUTE / 2


async def _release(stage: Stage, run: Run, state: str, at: datetime) -> None:
    async with stage.db.transaction() as tx:
        await tx.execute(
            "update compute.allocations set state = $2, billing_ended_at = $3, node_id = 'nod_1',"
            " deadline_at = case when $2 = 'releasing' then $3::timestamptz end where id = $1",
            run.id,
            state,
            at,
        )


async def _lose(stage: Stage) -> None:
    async with stage.db.transaction() as tx:
        lost = Release(Limits()).node
        await lost(tx, audit.system("worker"), "nod_1", "its node was lost", ended_at=LAST_HEARTBEAT)


@pytest.mark.parametrize("state", ["releasing", "release_failed"])
@pytest.mark.parametrize("charged_first", [True, False])
async def test_a_release_asked_for_meanwhile_keeps_nobody_paying(
    stage: Stage, state: str, *, charged_first: bool
) -> None:
    run = await stage.start(T0)
    await _release(stage, run, state, T0 + 5 * MINUTE)
    if charged_first:
        await stage.accrue(T0 + 6 * MINUTE)
    await _lose(stage)
    await stage.accrue(T0 + 8 * MINUTE)
    stage.runs[run.id] = Run(run.id, run.organisation_id, run.price_microusd, T0, LAST_HEARTBEAT)
    await stage.holds(T0 + 8 * MINUTE)
    assert await stage.value("select settled from compute.allocations where id = $1", run.id)


async def test_an_end_that_moves_twice_stops_nobody_from_being_charged(stage: Stage) -> None:
    run, other = await stage.start(T0), await stage.start(T0)
    await stage.accrue(T0 + 6 * MINUTE)
    await _release(stage, run, "releasing", T0 + 4 * MINUTE)
    await stage.accrue(T0 + 7 * MINUTE)
    await _lose(stage)
    await stage.accrue(T0 + 8 * MINUTE)
    assert await stage.charged(other.id) == other.cost(T0 + 8 * MINUTE)
    assert await stage.charged(run.id) == run.cost(LAST_HEARTBEAT)

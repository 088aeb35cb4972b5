"""The feed of whoever has little to read, in a log that has much."""

import json

import pytest

from penstock.kit import feed
from penstock.kit.caller import Caller
from penstock.kit.db import Database

ORG, PROJECT = "org_quiet", f"prj_{'q' * 26}"
ROWS = """
    insert into kit.outbox (event_id, type, aggregate_id, version, organisation_id, project_id, correlation_id, payload)
    select 'evt_' || n, 'provisioning.active', 'alc_' || n, 1, 'org_' || n % 9,
        case when n % 3 = 0 then null else 'prj_' || n % 9 end, 'cor', '{}' from generate_series(1, 20000) n
"""


@pytest.mark.parametrize("statement", [feed.OLDEST_FIRST, feed.NEWEST_FIRST])
async def test_a_quiet_project_does_not_cost_a_walk_through_the_log(database: Database, statement: str) -> None:
    async with database.transaction() as tx:
        await tx.execute(ROWS)
    async with database.read() as conn:
        await conn.execute("analyze kit.outbox")
        end = ("0", 0) if statement == feed.OLDEST_FIRST else (str(2**63 - 1), 2**63 - 1)
        told = await conn.fetchval(
            f"explain (analyze, buffers, format json) {statement}", PROJECT, False, *end, None, None, 51, ORG
        )
    [plan] = json.loads(told) if isinstance(told, str) else told
    assert plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"] <= 20, plan


async def test_organisation_and_project_come_in_one_order_and_once(database: Database) -> None:
    caller = Caller(
        principal_id="usr_a",
        principal_kind="user",
        display_name="someone",
        organisation_id=ORG,
        project_id=PROJECT,
        role="admin",
        actions=frozenset({"events.read", "events.read_organisation"}),
    )
    wanted = [(ORG, PROJECT), (ORG, None), ("org_other", None), (None, None), (ORG, "prj_other"), (ORG, PROJECT)]
    async with database.transaction() as tx:
        for number, (organisation, project) in enumerate(wanted):
            await tx.execute(
                "insert into kit.outbox (event_id, type, aggregate_id, version, organisation_id, project_id,"
                " correlation_id, payload) values ($1, 't', $1, 1, $2, $3, 'cor', '{}')",
                f"evt_{number}",
                organisation,
                project,
            )
    async with database.read() as conn:
        first = await feed.read_events(conn, caller, feed.EventFilter(), feed.START, 10)
        last = await feed.read_events(conn, caller, feed.EventFilter(), (2**62, 0), 2, newest_first=True)
    assert [event.event_id for event in first] == ["evt_0", "evt_1", "evt_5"]
    assert [event.event_id for event in last] == ["evt_5", "evt_1"]

"""What must hold after any number of crashes, read from the truth and from the node itself."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import nats

from e2e.cloud import Cloud
from penstock.wire.events import Envelope

_SETTLED_S = 90
_HELD = "select count(*) from compute.claims where released_at is null"
_TWICE = """
select a.slot_id from compute.claims a join compute.claims b
    on a.slot_id = b.slot_id and (a.allocation_id) < (b.allocation_id)
   and tstzrange(a.claimed_at, coalesce(a.released_at, 'infinity'))
    && tstzrange(b.claimed_at, coalesce(b.released_at, 'infinity'))
"""
_UNFINISHED = """
select id, state, reason from compute.allocations where state not in ('released', 'failed')
"""
_UNSETTLED = "select count(*) from compute.billable"
#: What each allocation was charged, against the closed form.
_MISCHARGED = """
with paid as (
    select id, price_microusd_per_hour as price, extract(epoch from billing_ended_at - active_at) * 1000000 as us
    from compute.allocations where active_at is not null and purpose <> 'stock'
), charged as (
    select series_id as id, sum(amount_microusd) as amount, sum(quantity) as us from billing.usage group by series_id
)
select p.id, div(p.us * p.price, 3600000000) as owed, c.amount, p.us, c.us from paid p left join charged c using (id)
where div(p.us * p.price, 3600000000) <> coalesce(c.amount, 0) or p.us <> coalesce(c.us, 0)
"""
_UNBALANCED = "select transfer_id from billing.entries group by 1 having sum(amount_microusd) <> 0"
_TOTALS = """
select (select sum(amount_microusd) from billing.usage) as used,
    (select sum(amount_microusd) from billing.entries where account_id = 'platform/revenue') as earned
"""


def setting(cloud: Cloud, name: str) -> str:
    """A setting as the running api has it."""
    processes = json.loads((cloud.data / "status.json").read_text())["processes"]
    pid = next(entry["pid"] for entry in processes if entry["name"] == "api")
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(entry for entry in environment if entry.startswith(name.encode() + b"=")).decode().partition("=")[2]


async def fetch(cloud: Cloud, query: str) -> list[Any]:
    """Rows straight from Postgres."""
    conn = await asyncpg.connect(setting(cloud, "PENSTOCK_DATABASE_URL"))
    try:
        return await conn.fetch(query)
    finally:
        await conn.close()


async def everything_ended(cloud: Cloud) -> None:
    """All allocations are released or failed, and hold nothing."""
    for _ in range(_SETTLED_S):
        unfinished = await fetch(cloud, _UNFINISHED)
        if not unfinished:
            break
        await asyncio.sleep(1)
    assert not unfinished, f"{unfinished}\n{cloud.logs()}"
    assert (await fetch(cloud, _HELD))[0][0] == 0
    assert await fetch(cloud, _TWICE) == []


async def every_second_is_charged_once(cloud: Cloud) -> int:
    """Each allocation was charged what its time costs, to the last micro-dollar, and the ledger says the same."""
    for _ in range(_SETTLED_S):
        if (await fetch(cloud, _UNSETTLED))[0][0] == 0:
            break
        await asyncio.sleep(1)
    assert (await fetch(cloud, _UNSETTLED))[0][0] == 0, cloud.logs()
    assert await fetch(cloud, _MISCHARGED) == []
    assert await fetch(cloud, _UNBALANCED) == []
    used, earned = (await fetch(cloud, _TOTALS))[0]
    assert used == earned
    return used


async def no_outage_is_billed(cloud: Cloud, off: datetime) -> None:
    """What ran when everything was turned off is paid for until then, once the worker has seen that it is gone."""
    moment = f"'{off.isoformat()}'::timestamptz"
    ran = f"select id, billing_ended_at from compute.allocations where purpose <> 'stock' and active_at < {moment}"
    hit = await fetch(cloud, f"{ran} and billing_ended_at > {moment} - interval '30 s'")
    assert hit, "nothing ran when everything was turned off"
    for _ in range(_SETTLED_S):
        billed = await fetch(cloud, f"{ran} and billing_ended_at > {moment}")
        if not billed:
            return
        await asyncio.sleep(1)
    raise AssertionError(f"off at {off}: {billed}\n{cloud.logs()}")


async def no_unit_is_left(cloud: Cloud) -> None:
    """No process of any unit that ever was runs, and the node's folder of units is empty."""
    assert unit_folders(cloud) == set()
    ever = {row["unit_id"] for row in await fetch(cloud, "select unit_id from compute.allocations")}
    assert ever
    assert sandboxes(ever) == {}


def unit_folders(cloud: Cloud) -> set[str]:
    """The units that the node knows."""
    return {entry.name for entry in (cloud.data / "node" / "units").iterdir()}


def sandboxes(units: Collection[str]) -> dict[int, str]:
    """Processes whose arguments (the sandbox's hostname) or control group name one of these units."""
    found: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            told = (entry / "cmdline").read_bytes() + (entry / "cgroup").read_bytes()
            found |= {int(entry.name): unit for unit in units if unit.encode() in told}
    return found


async def events_are_complete_and_in_order(cloud: Cloud) -> int:
    """Every committed event was published, and each aggregate's versions ascend without a gap."""
    for _ in range(_SETTLED_S):
        if (await fetch(cloud, "select count(*) from kit.waiting"))[0][0] == 0:
            break
        await asyncio.sleep(1)
    committed = {row["event_id"] for row in await fetch(cloud, "select event_id from kit.outbox")}
    client = await nats.connect(setting(cloud, "PENSTOCK_NATS_URL"))
    try:
        stream = client.jetstream()
        state = (await stream.stream_info("EVENTS")).state
        versions: dict[str, list[int]] = defaultdict(list)
        seen: set[str] = set()
        for seq in range(state.first_seq, state.last_seq + 1):
            event = msgspec.json.decode((await stream.get_msg("EVENTS", seq)).data or b"", type=Envelope)
            if event.event_id not in seen:
                versions[event.aggregate_id].append(event.version)
            seen.add(event.event_id)
    finally:
        await client.close()
    assert seen == committed
    for aggregate_id, published in versions.items():
        assert published == list(range(published[0], published[0] + len(published))), aggregate_id
    return len(committed)

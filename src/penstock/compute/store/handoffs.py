"""The statement that gives a unit of warm stock to a tenant.

It picks with `for update skip locked`, so that each unit goes to one tenant and nobody waits. With `allocations.move`
it is the only one that writes the state column, by the same table of moves.
"""

from typing import Final

from penstock.compute.model import (
    INITIAL,
    MOVES,
    REQUESTED_FACT,
    Allocation,
    Claim,
    Draft,
    Event,
    Sku,
    State,
    fact,
)
from penstock.compute.store.allocations import of_row
from penstock.kit import outbox
from penstock.kit.db import Tx
from penstock.kit.ids import new_id

HANDED: Final = "handed over to "
FROM_STOCK: Final = "from warm stock"

_COLUMNS: Final = ", ".join(Allocation.__dataclass_fields__)
_SLOT: Final = ", ".join(Claim.__dataclass_fields__)
#: On a node that takes work, with GPUs that are well and what the offer promises: it may have been changed since the
#: unit was started.
PROMISED: Final = """not exists (
    select 1 from compute.claims c where c.allocation_id = a.id and c.released_at is null
        and not exists (
            select 1 from fleet.placeable_slots p where p.slot_id = c.slot_id and p.kind = {share}
                and {model} in ('*', p.gpu_model) and (p.kind <> 'mig' or p.profile = {profile})
                and ({purpose} <> 'function_worker' or p.serves_functions)))"""


async def forget(tx: Tx, allocation_id: str, why: str) -> None:
    """A unit of its own takes the place of the stock unit; the timeline says why."""
    await tx.execute(
        "update compute.allocations set unit_id = id, stock_id = null,"  # noqa: S608
        f" timeline = timeline || {_line(_PLACED, '$2::text')} where id = $1",
        allocation_id,
        why,
    )


async def hand_over(tx: Tx, draft: Draft, offer: Sku, *, deadline_s: float) -> Allocation | None:
    """Give the oldest fitting unit to this draft, which is at once provisioning; none when there is no such unit, or
    others of the same shape wait already."""
    row = await tx.fetchrow(
        _HAND_OVER,
        *(getattr(draft, name) for name in _GIVEN),
        deadline_s,
        *(new_id("evt") for _ in range(3)),
        offer.share,
        offer.gpu_model,
        offer.mig_profile,
    )
    if row is None:
        return None
    outbox.wake(tx)
    return of_row(row)


#: What the tenant's row gets from the draft; unit and stock come from the stock row.
_GIVEN: Final = tuple(name for name in Draft.__dataclass_fields__ if name not in ("unit_id", "stock_id"))
_N: Final = {name: f"${number}" for number, name in enumerate(_GIVEN, 1)}
_DEADLINE, _STOCK_EVENT, _FIRST_EVENT, _SECOND_EVENT, _SHARE, _MODEL, _PROFILE = (
    f"${len(_GIVEN) + number}" for number in range(1, 8)
)
_PLACED: Final = MOVES[INITIAL, Event.PLACED]
_LEFT: Final = MOVES[State.ACTIVE, Event.HANDED_OVER]


def _line(state: State, reason: str) -> str:
    return f"jsonb_build_object('state', '{state}', 'reason', {reason}, 'at', clock_timestamp())"


def _payload(row: str, state: State, reason: str) -> str:
    """The same as `Draft.payload`, of a row that only the statement knows."""
    names = ("purpose", "sku", "gpus", "node_id", "price_microusd_per_hour")
    copied = ", ".join(f"'{name}', {row}.{name}" for name in names)
    return f"jsonb_build_object('allocation_id', {row}.id, {copied}, 'state', '{state}', 'reason', {reason})"


_FACTS: Final = f"""
    select 1 as nth, {_STOCK_EVENT} as event_id, '{fact(State.ACTIVE, Event.HANDED_OVER)}' as type, id, version,
        organisation_id, project_id, correlation_id, {_payload("handed", _LEFT, "handed.reason")} as payload from handed
    union all select 2, {_FIRST_EVENT}, '{REQUESTED_FACT}', id, 1,
        organisation_id, project_id, correlation_id, {_payload("added", INITIAL, "''")} from added
    union all select 3, {_SECOND_EVENT}, '{fact(INITIAL, Event.PLACED)}', id, version,
        organisation_id, project_id, correlation_id, {_payload("added", _PLACED, "added.reason")} from added
"""  # noqa: S608
#: One statement for what would be five: the tenant's request waits for each of them. Each part reads from the one
#: before it, so that unit and slots are given up before they are taken.
_HAND_OVER: Final = f"""
    with picked as materialized (
        select a.id from compute.allocations a
        where a.purpose = 'stock' and a.state = '{State.ACTIVE}'
            and a.sku = {_N["sku"]} and a.gpus = {_N["gpus"]}
            and a.image = {_N["image"]} and a.runtime = {_N["runtime"]}
            and a.memory_bytes = {_N["memory_bytes"]} and a.cpus = {_N["cpus"]}
            and a.processes_max = {_N["processes_max"]} and a.scratch_bytes = {_N["scratch_bytes"]}
            and {PROMISED.format(share=_SHARE, model=_MODEL, profile=_PROFILE, purpose=_N["purpose"])}
            and not exists (
                select 1 from compute.waiting w where w.sku = {_N["sku"]} and w.gpus = {_N["gpus"]} and not w.reserved)
        order by a.active_at limit 1 for update of a skip locked
    ), handed as (
        update compute.allocations a set state = '{_LEFT}', reason = '{HANDED}' || {_N["id"]}, version = version + 1,
            ended_at = clock_timestamp(), billing_ended_at = clock_timestamp(), changed_at = clock_timestamp(),
            timeline = timeline || {_line(_LEFT, f"'{HANDED}' || {_N['id']}")}
        from picked where a.id = picked.id returning a.*
    ), freed as (
        update compute.claims c set released_at = clock_timestamp()
        from handed where c.allocation_id = handed.id and c.released_at is null
        returning {", ".join(f"c.{name}" for name in Claim.__dataclass_fields__)}
    ), claimed as (
        insert into compute.claims (allocation_id, project_id, {_SLOT})
        select {_N["id"]}, {_N["project_id"]}, {_SLOT} from freed order by slot_id
    ), added as (
        insert into compute.allocations ({", ".join(_GIVEN)}, unit_id, stock_id, state, reason, version, node_id,
            deadline_at, placed_at, driven_at, gpu_uuids, simulated, timeline)
        select {", ".join(_N.values())}, handed.unit_id, handed.id, '{_PLACED}', '{FROM_STOCK}', 2, handed.node_id,
            clock_timestamp() + make_interval(secs => {_DEADLINE}), clock_timestamp(), clock_timestamp(),
            handed.gpu_uuids, handed.simulated,
            jsonb_build_array({_line(INITIAL, "''")}, {_line(_PLACED, f"'{FROM_STOCK}'")})
        from handed returning {_COLUMNS}
    ), facts as (
        insert into kit.outbox ({outbox.COLUMNS})
        select event_id, type, id, version, organisation_id, project_id, correlation_id, payload
        from ({_FACTS}) as f order by nth
    )
    select * from added
"""  # noqa: S608

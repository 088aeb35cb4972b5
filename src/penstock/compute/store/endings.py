"""The end of billing where it turns out to have been earlier, and allocations that are paid for to the end."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from penstock.compute.model import Allocation
from penstock.kit.db import Reader, Tx

#: A node lists its units again at once when they change, and the gateway stores lists every second.
_NEXT_LIST_S: Final = 5.0


async def end_billing(tx: Tx, node_id: str, at: datetime) -> None:
    """Nobody pays for a node after this time, also of what was on its way out by then. What was paid for to a later end
    goes back on the meter, which gives the difference back."""
    await tx.execute(
        """
        with late as (
            select id from compute.allocations where node_id = $1 and ended_at is null
                and state in ('releasing', 'release_failed') and billing_ended_at > greatest(active_at, $2)
            order by id for update
        )
        update compute.allocations set billing_ended_at = greatest(active_at, $2), settled = false
        where id in (select id from late)
        """,
        node_id,
        at,
    )


async def known_end(conn: Reader, allocation: Allocation) -> datetime | None:
    """Until when its unit ran, if its node has said that it is over. A list that was on its way when the unit started
    lacks it too: one that is gone counts once the node has had the time for another list."""
    return await conn.fetchval(
        "select ran_until from fleet.unit_ends where unit_id = $1 and node_id = $2"
        " and (state = 'exited' or since < clock_timestamp() - make_interval(secs => $3))",
        allocation.unit_id,
        allocation.node_id,
        _NEXT_LIST_S,
    )


async def end_unheard(tx: Tx) -> int:
    """The same for units that were gone when their nodes came back, after a release that had been asked for."""
    rows = await tx.fetch(
        """
        with late as (
            select a.id, greatest(a.active_at, e.ran_until) as ended_at
            from fleet.unit_ends e join compute.allocations a on a.unit_id = e.unit_id and a.node_id = e.node_id
            where e.unheard and a.billing_ended_at > greatest(a.active_at, e.ran_until)
            order by a.id for update of a
        )
        update compute.allocations a set billing_ended_at = late.ended_at, settled = false
        from late where a.id = late.id returning a.id
        """
    )
    return len(rows)


async def settle(tx: Tx, allocation_ids: Sequence[str]) -> None:
    """Note that nothing of them remains to be charged. They are locked in the order in which all others lock them."""
    await tx.execute(
        "with locked as (select id from compute.allocations where id = any($1) order by id for update)"
        " update compute.allocations set settled = true where id in (select id from locked)",
        list(allocation_ids),
    )

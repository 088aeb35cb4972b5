"""The ledger by request and by allocation."""

from collections.abc import Sequence
from datetime import datetime

from penstock.kit.db import Reader
from penstock.wire.rest import Charge, LedgerRow


async def entries_of_request(
    conn: Reader, correlation_id: str, organisation_ids: Sequence[str], since: datetime, *, limit: int
) -> list[LedgerRow]:
    """Entries of these organisations' transfers with this correlation id, oldest first."""
    rows = await conn.fetch(
        """
        select e.transfer_id, t.kind, e.account_id, e.amount_microusd, t.memo, t.at
        from billing.transfers t join billing.entries e on e.transfer_id = t.id
        where t.organisation_id = any($2) and t.at >= $3 and t.correlation_id = $1 order by e.seq limit $4
        """,
        correlation_id,
        list(organisation_ids),
        since,
        limit,
    )
    return [LedgerRow(**dict(row)) for row in rows]


async def charges(conn: Reader, allocation_ids: Sequence[str], *, limit: int) -> list[Charge]:
    """Days of these series, oldest first."""
    rows = await conn.fetch(
        "select series_id as allocation_id, day, quantity, amount_microusd, until_at from billing.daily"
        " where series_id = any($1) order by day, series_id limit $2",
        list(allocation_ids),
        limit,
    )
    return [Charge(**dict(row)) for row in rows]

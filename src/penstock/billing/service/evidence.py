"""What the ledger knows of one request, for operators."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from penstock.billing.store import evidence
from penstock.kit.db import Reader
from penstock.wire.rest import Charge, LedgerRow

#: The clocks of the request's parts differ by less.
_LEEWAY: Final = timedelta(minutes=1)


async def transfers_of_request(
    conn: Reader, correlation_id: str, organisation_ids: Sequence[str], since: datetime, *, limit: int
) -> list[LedgerRow]:
    """The entries of every transfer that it made since then for one of these organisations, oldest first."""
    return await evidence.entries_of_request(conn, correlation_id, organisation_ids, since - _LEEWAY, limit=limit)


async def charges(conn: Reader, allocation_ids: Sequence[str], *, limit: int) -> list[Charge]:
    """What these allocations were charged, by day."""
    return await evidence.charges(conn, allocation_ids, limit=limit)

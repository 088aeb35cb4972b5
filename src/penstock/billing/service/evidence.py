"""What the ledger knows of one request, for operators."""

from collections.abc import Sequence

from penstock.billing.store import evidence
from penstock.kit.db import Reader
from penstock.wire.rest import Charge, LedgerRow


async def transfers_of_request(conn: Reader, correlation_id: str, *, limit: int) -> list[LedgerRow]:
    """The entries of every transfer that it made, oldest first."""
    return await evidence.entries_of_request(conn, correlation_id, limit=limit)


async def charges(conn: Reader, allocation_ids: Sequence[str], *, limit: int) -> list[Charge]:
    """What these allocations were charged, by day."""
    return await evidence.charges(conn, allocation_ids, limit=limit)

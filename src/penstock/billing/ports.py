"""What billing asks of other domains inside its own transactions; filled in `processes/`. None of them commits."""

from collections.abc import Sequence
from typing import Protocol

from penstock.kit.db import Tx


class Allocations(Protocol):
    """Compute's allocations, which billing reads from the views `compute.billable` and `compute.commitments`."""

    async def settle(self, tx: Tx, allocation_ids: Sequence[str]) -> None:
        """They are charged to their end, and leave the meter."""
        ...

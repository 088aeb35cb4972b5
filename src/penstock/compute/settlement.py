"""What billing tells compute (its Protocol `Allocations`)."""

from collections.abc import Sequence

from penstock.compute.store import endings
from penstock.kit.db import Tx


class Settlement:
    """Takes allocations off the meter."""

    async def settle(self, tx: Tx, allocation_ids: Sequence[str]) -> None:
        """They are paid for to the end."""
        await endings.settle(tx, allocation_ids)

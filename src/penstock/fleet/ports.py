"""What the fleet asks of other domains; filled in `processes/`."""

from collections.abc import AsyncIterator, Sequence
from typing import Final, Protocol

from penstock.kit.db import Reader, Tx
from penstock.wire.tasks import SecretRef


class Claims(Protocol):
    """Who holds which slots."""

    async def holders(self, conn: Reader, node_ids: list[str]) -> dict[str, str]:
        """Slot id → allocation id, for the slots of these nodes that are held now."""
        ...


class Secrets(Protocol):
    """The values of secrets that units get."""

    async def values(
        self, tx: Tx, *, node_id: str, allocation_id: str, refs: Sequence[SecretRef], serves: bool
    ) -> dict[str, bytes]:
        """By name, for the node that is to start the allocation's unit; the asker has checked that it is. A unit that
        serves a function also gets its `WORKER_KEYS`."""
        ...


class Codes(Protocol):
    """The code of functions that units run."""

    async def open(self, *, node_id: str, allocation_id: str) -> tuple[int, AsyncIterator[bytes]]:
        """The size and bytes of the archive that the allocation's unit needs; NotFound unless this node has the
        allocation and there is such code."""
        ...


class Handoffs(Protocol):
    """Whoever waits for stock units to be handed over."""

    async def ended(self, tx: Tx, *, allocation_id: str, fence: int, succeeded: bool) -> None:
        """A node has answered, under a fence that still holds as far as the fleet knows."""
        ...


class Unheard:
    """Nobody waits."""

    async def ended(self, tx: Tx, *, allocation_id: str, fence: int, succeeded: bool) -> None:
        """Nothing follows."""


UNHEARD: Final = Unheard()

"""What the fleet asks of other domains; filled in `processes/`."""

from typing import Protocol

from penstock.kit.db import Reader


class Claims(Protocol):
    """Who holds which slots."""

    async def holders(self, conn: Reader, node_ids: list[str]) -> dict[str, str]:
        """Slot id → allocation id, for the slots of these nodes that are held now."""
        ...

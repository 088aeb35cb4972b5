"""Who holds which slots, for the fleet (its Protocol `Claims`)."""

from penstock.compute.store import claims
from penstock.kit.db import Reader


class Claims:
    """Compute's answer."""

    async def holders(self, conn: Reader, node_ids: list[str]) -> dict[str, str]:
        """Slot id → allocation id, for the slots of these nodes that are held now."""
        return await claims.holders(conn, node_ids)

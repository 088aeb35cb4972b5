"""Whether a project is still in use, for identity (its Protocol `Occupancy`)."""

from penstock.compute.store import allocations
from penstock.kit.db import Reader


class Occupancy:
    """Compute's answer."""

    async def occupied(self, conn: Reader, project_id: str) -> str:
        """That it has allocations, while one has not ended."""
        return "allocations" if await allocations.any_unended(conn, project_id) else ""

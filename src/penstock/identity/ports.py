"""What identity asks of others; filled in `processes/`."""

from typing import Protocol

from penstock.kit.db import Reader


class Occupancy(Protocol):
    """Whoever keeps things in projects."""

    async def occupied(self, conn: Reader, project_id: str) -> bool:
        """Whether the project still holds something that runs or costs."""
        ...

"""What identity asks of others; filled in `processes/`."""

from typing import Protocol

from penstock.kit.db import Reader


class Occupancy(Protocol):
    """Whoever keeps things in projects."""

    async def occupied(self, conn: Reader, project_id: str) -> str:
        """What the project still holds that runs or costs, or may at any time; nothing, if it is empty."""
        ...

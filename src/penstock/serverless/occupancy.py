"""What keeps a project in use, for identity (its Protocol `Occupancy`): functions may start workers at any time."""

from penstock.kit.db import Reader
from penstock.serverless.store import functions


class Occupancy:
    """The functions' answer."""

    async def occupied(self, conn: Reader, project_id: str) -> str:
        """That it has functions, while one is not deleted."""
        return "functions" if await functions.any_deployed(conn, project_id) else ""

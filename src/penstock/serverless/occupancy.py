"""What functions keep in use: a project, for identity (its Protocol `Occupancy`), an offer and a runtime, for compute
(its Protocol `Users`). They may start workers at any time."""

from collections.abc import Sequence

from penstock.kit.db import Reader
from penstock.serverless.store import functions


class Occupancy:
    """The functions' answer."""

    async def occupied(self, conn: Reader, project_id: str) -> str:
        """That it has functions, while one is not deleted."""
        return "functions" if await functions.any_deployed(conn, project_id) else ""

    async def of_sku(self, conn: Reader, sku: str, *, limit: int) -> Sequence[str]:
        """The functions that are served with this offer."""
        found = await functions.of_sku(conn, sku, limit=limit)
        return [f"function {name} in project {project_id}" for project_id, name in found]

    async def of_runtime(self, conn: Reader, project_id: str, runtime: str, *, limit: int) -> Sequence[str]:
        """The functions with a version, current or kept, that names this runtime."""
        return [f"function {name}" for name in await functions.of_runtime(conn, project_id, runtime, limit=limit)]

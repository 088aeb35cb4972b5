"""Which versions of secrets allocations still need, for secrets (its Protocol `References`)."""

from collections.abc import Collection

from penstock.compute.store import allocations
from penstock.kit.db import Reader


class References:
    """Compute's answer."""

    async def referred(self, conn: Reader, project_ids: Collection[str]) -> set[tuple[str, str, int]]:
        """(project, name, version) of the secrets of all allocations of these projects that have not ended."""
        return await allocations.secrets_referred(conn, list(project_ids))

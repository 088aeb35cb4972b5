"""Which projects there are, for compute (its Protocol `Projects`)."""

from penstock.identity import store
from penstock.kit.db import Reader


class Directory:
    """Identity's answer."""

    async def exists(self, conn: Reader, project_id: str) -> bool:
        """Whether there is such a project, and it is not archived."""
        return await store.find_project(conn, project_id) is not None

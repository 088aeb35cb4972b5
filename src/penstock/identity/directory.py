"""Which organisations, projects and keys there are, for compute (`Projects`) and billing (`Organisations`, `Keys`)."""

from collections.abc import Mapping, Sequence

from penstock.identity import store
from penstock.kit.db import Reader


class Directory:
    """Identity's answer."""

    async def exists(self, conn: Reader, project_id: str) -> bool:
        """Whether there is such a project, and it is not archived."""
        return await store.find_project(conn, project_id) is not None

    async def organisation_name(self, conn: Reader, organisation_id: str) -> str | None:
        """What an organisation is called; none when there is none."""
        return await store.organisation_name(conn, organisation_id)

    async def project_names(self, conn: Reader, project_ids: Sequence[str]) -> Mapping[str, str]:
        """What projects are called, archived ones included."""
        return await store.project_names(conn, project_ids)

    async def key_exists(self, conn: Reader, project_id: str, key_id: str) -> bool:
        """Whether the project has such a key, and it is not revoked."""
        found = await store.find_key(conn, project_id, key_id)
        return found is not None and found.revoked_at is None

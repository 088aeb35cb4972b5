"""What code a worker needs: the archive that its function's version names, wherever the function is by now."""

from dataclasses import dataclass

from penstock.kit.db import Reader
from penstock.serverless.store import codes


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeObject:
    """An archive among a project's objects, as it was when the version was made."""

    project_id: str
    key: str
    sha256: str


class Codes:
    """Serverless's answer."""

    async def find(self, conn: Reader, allocation_id: str) -> CodeObject | None:
        """The code of the worker that has this allocation; none when it is gone or has none."""
        found = await codes.find(conn, allocation_id)
        if found is None:
            return None
        project_id, key, sha256 = found
        return CodeObject(project_id=project_id, key=key, sha256=sha256)

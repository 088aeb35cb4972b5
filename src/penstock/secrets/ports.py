"""What secrets asks of other domains; filled in `processes/`."""

from collections.abc import Collection
from typing import Protocol

from penstock.kit.db import Reader


class References(Protocol):
    """Who may still need old versions."""

    async def referred(self, conn: Reader, project_ids: Collection[str]) -> set[tuple[str, str, int]]:
        """(project, name, version) of all that something living in these projects refers to."""
        ...

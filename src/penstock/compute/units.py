"""Where an allocation's unit runs, for access (its Protocol `Units`)."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.compute.model import FINAL, State
from penstock.compute.store import allocations
from penstock.kit.db import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitAddress:
    """A unit, and its node once it has one. Whoever may run commands in it may reach any of its ports."""

    node_id: str | None
    unit_id: str
    state: State


class Units:
    """Compute's answer."""

    async def find(self, conn: Reader, *, project_id: str, allocation_id: str) -> UnitAddress | None:
        """The unit of an allocation of this project; none when there is no such allocation."""
        found = await allocations.in_project(conn, project_id, allocation_id)
        if found is None:
            return None
        return UnitAddress(node_id=found.node_id, unit_id=found.unit_id, state=found.state)

    async def over(self, conn: Reader, allocation_ids: Sequence[str]) -> dict[str, str]:
        """Those of these that neither run nor will run, with what their rows say about that."""
        return await allocations.over(conn, allocation_ids)

    async def node(self, conn: Reader, allocation_id: str) -> str | None:
        """Where the unit is or will be, while the allocation lives."""
        found = await allocations.find(conn, allocation_id)
        return found.node_id if found and found.state not in FINAL else None

    async def project(self, conn: Reader, allocation_id: str) -> str | None:
        """Whose the unit is, while the allocation lives."""
        found = await allocations.find(conn, allocation_id)
        return found.project_id if found and found.state not in FINAL else None

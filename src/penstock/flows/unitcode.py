"""The code of functions for the nodes that start their workers (the fleet's Protocol `Codes`)."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from penstock.compute.units import Units
from penstock.kit.db import Database
from penstock.kit.errors import NotFound
from penstock.serverless.service.codes import Codes
from penstock.storage.service import Objects


@dataclass(frozen=True, slots=True)
class UnitCode:
    """Opens it for the node that has the allocation, and for no other."""

    database: Database
    units: Units
    codes: Codes
    objects: Objects

    async def open(self, *, node_id: str, allocation_id: str) -> tuple[int, AsyncIterator[bytes]]:
        """The archive's size and bytes. What was put in its object's place since is not that code."""
        async with self.database.read() as conn:
            here = await self.units.node(conn, allocation_id) == node_id
            code = await self.codes.find(conn, allocation_id) if here else None
        if code is None:
            raise NotFound("this node starts no unit with such code", allocation_id=allocation_id)
        found = await self.objects.find(code.project_id, code.key)
        if found.sha256.hex() != code.sha256:
            raise NotFound("the object is no longer the version's code", allocation_id=allocation_id)
        return found.size, (await self.objects.read(found, 0, found.size)).chunks

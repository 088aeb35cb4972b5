"""The values of a unit's secrets, for fleet (its Protocol `Secrets`). Compute knows whose the unit is."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.compute.units import Units
from penstock.kit.audit import Actor
from penstock.kit.db import Tx
from penstock.kit.errors import NotFound
from penstock.secrets.service import Secrets
from penstock.wire.tasks import SecretRef


@dataclass(frozen=True, slots=True)
class UnitSecrets:
    """Opens them for the node that starts the unit."""

    units: Units
    secrets: Secrets

    async def values(self, tx: Tx, *, node_id: str, allocation_id: str, refs: Sequence[SecretRef]) -> dict[str, bytes]:
        """By name. The references count in the allocation's own project, whatever else they say."""
        project_id = await self.units.project(tx, allocation_id)
        if project_id is None:
            raise NotFound("the allocation has ended", allocation_id=allocation_id)
        return await self.secrets.reveal(tx, Actor(id=node_id, kind="node"), project_id=project_id, refs=refs)

"""What a unit is told in secret, for fleet (its Protocol `Secrets`): its project's secrets, and a worker's keys."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from penstock.compute.units import Units
from penstock.kit.audit import Actor
from penstock.kit.db import Tx
from penstock.kit.errors import NotFound
from penstock.secrets.service import Secrets
from penstock.serverless.service import workers
from penstock.wire.tasks import WORKER_KEYS, SecretRef


@dataclass(frozen=True, slots=True)
class UnitSecrets:
    """Opens them for the node that starts the unit."""

    units: Units
    secrets: Secrets

    async def values(
        self, tx: Tx, *, node_id: str, allocation_id: str, refs: Sequence[SecretRef], serves: bool
    ) -> dict[str, bytes]:
        """By name. The references count in the allocation's own project, whatever else they say."""
        project_id = await self.units.project(tx, allocation_id)
        if project_id is None:
            raise NotFound("the allocation has ended", allocation_id=allocation_id)
        actor = Actor(id=node_id, kind="node")
        values = await self.secrets.reveal(tx, actor, project_id=project_id, refs=refs) if refs else {}
        if serves:
            values[WORKER_KEYS] = msgspec.msgpack.encode(await workers.new_keys(tx, allocation_id))
        return values

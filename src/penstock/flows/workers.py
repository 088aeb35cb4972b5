"""Allocations for functions' workers (serverless's Protocol `Pool`): created as by whoever deployed the function."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.compute.model import Purpose
from penstock.compute.service.create import Create
from penstock.compute.service.release import Release
from penstock.compute.units import Units
from penstock.kit import audit
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.serverless.model import Order
from penstock.wire.rest import AllocationCreate
from penstock.wire.serverless import SOCKET_FOLDER
from penstock.wire.tasks import Code, Serving

_ACTOR: Final = audit.system("functions")


@dataclass(frozen=True, slots=True)
class Workers:
    """Creates and releases."""

    create_allocation: Create
    release_allocation: Release
    units: Units

    async def create(self, tx: Tx, order: Order) -> str:
        """The id of a new allocation. Whoever deployed it may have lost the right since: what is deployed goes on."""
        definition = order.definition
        body = AllocationCreate(
            sku=definition.sku,
            gpus=definition.gpus,
            image=definition.image,
            runtime=definition.runtime,
            env=definition.env,
            command=definition.command,
            secrets=definition.secrets,
            labels={**definition.labels, "function": order.function},
        )
        made = await self.create_allocation(
            tx, _caller(order), body, purpose=Purpose.FUNCTION_WORKER, serving=_serving(order)
        )
        return made.id

    async def release(self, tx: Tx, allocation_id: str, reason: str) -> None:
        """Give it back."""
        await self.release_allocation.by_system(tx, _ACTOR, allocation_id, reason)

    async def over(self, conn: Reader, allocation_ids: Sequence[str]) -> dict[str, str]:
        """Those that neither run nor will run, and why."""
        return await self.units.over(conn, allocation_ids)


def _caller(order: Order) -> Caller:
    return Caller(
        principal_id=order.created_by,
        principal_kind=order.created_kind,
        display_name="",
        organisation_id=order.organisation_id,
        project_id=order.project_id,
        role="function",
        actions=frozenset({"allocations.create", "runtimes.read", "secrets.read"}),
        key_id=order.key_id,
    )


def _serving(order: Order) -> Serving:
    definition = order.definition
    framework = definition.framework
    return Serving(
        worker=order.worker,
        project_id=order.project_id,
        function=order.function,
        request=order.request,
        slots=definition.concurrency,
        socket=framework.socketPath.removeprefix(f"{SOCKET_FOLDER}/"),
        invoke_path=framework.invokePath,
        health_path=framework.healthPath,
        ready_s=definition.start_timeout_s,
        framework=not definition.command,
        handler=definition.handler,
        code=Code(sha256=definition.code.sha256, bytes=definition.code.bytes) if definition.code else None,
    )

"""The source's units: one with a `serverless` block is a function's definition, and holds no GPU of its own.

An operation has one effect: the same one again is answered with what it made, and with another body it is a conflict.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.kit import audit
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import Invalid, missing
from penstock.serverless.definitions import Deployed
from penstock.serverless.errors import OperationConflict
from penstock.serverless.service import functions as use_cases
from penstock.serverless.service.functions import Functions
from penstock.serverless.store import functions, units
from penstock.serverless.store.units import Operation, Unit
from penstock.wire.rest import FunctionPut, GpuUnitCreate

_WORKERS_MAX: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownUnit:
    """A unit and how its function stands; none when that was deleted by its own name."""

    unit: Unit
    function: Deployed | None


@dataclass(frozen=True, slots=True)
class Units:
    """The use cases."""

    functions: Functions

    async def check(self, caller: Caller, body: GpuUnitCreate) -> tuple[str, FunctionPut]:
        """Name and definition of the function that the unit becomes. Before any transaction."""
        if not body.serverless.enabled:
            raise Invalid(
                "serverless.enabled must be true: rent GPUs by POST /api/v1/allocations", field="serverless.enabled"
            )
        if not body.serverless.requestID:
            raise Invalid("serverless.requestID is required", field="serverless.requestID")
        definition = as_definition(body)
        try:
            return await self.functions.check(caller, body.serverless.requestID, definition), definition
        except Invalid as error:
            field = {"name": "serverless.requestID"}.get(error.field or "", error.field)
            raise type(error)(error.detail, field=field) from error

    async def create(
        self, tx: Tx, caller: Caller, body: GpuUnitCreate, name: str, definition: FunctionPut
    ) -> tuple[ShownUnit, bool]:
        """The unit, and whether it is new."""
        caller.require("functions.write")
        await functions.lock_project(tx, caller.project_id)
        wanted = Operation(unit=body.name, kind="create", body=body)
        if await _came_before(tx, caller, wanted):
            return await get(tx, caller, body.name), False
        if await units.find(tx, caller.project_id, body.name) is not None:
            raise OperationConflict(f"there is a unit {body.name} already", field="name")
        made = await self.functions.put(tx, caller, name, definition)
        await units.insert(tx, caller.project_id, body, made.id)
        await units.remember(tx, caller.project_id, wanted)
        await audit.record(tx, caller.actor, "functions.create_unit", body.name, detail={"function": name})
        return await get(tx, caller, body.name), True

    async def update(
        self, tx: Tx, caller: Caller, unit: str, body: GpuUnitCreate, name: str, definition: FunctionPut
    ) -> ShownUnit:
        """Ask something else of a unit: its function gets a new version. Name, SKU and `requestID` stay."""
        caller.require("functions.write")
        await functions.lock_project(tx, caller.project_id)
        found = await _found(tx, caller, unit)
        wanted = Operation(unit=unit, kind="update", body=body)
        if await _came_before(tx, caller, wanted):
            return await get(tx, caller, unit)
        if body.name != unit:
            raise Invalid(f"name must be {unit}, as in the path", field="name")
        if definition.sku != as_definition(found.body).sku:
            raise Invalid("the SKU of a unit cannot be changed", field="specName" if body.specName else "packageID")
        if name != found.function_name:
            raise Invalid("serverless.requestID cannot be changed", field="serverless.requestID")
        made = await self.functions.put(tx, caller, name, definition)
        await units.update(tx, caller.project_id, body, made.id)
        await units.remember(tx, caller.project_id, wanted)
        await audit.record(tx, caller.actor, "functions.update_unit", unit, detail={"function": name})
        return await get(tx, caller, unit)


async def get(conn: Reader, caller: Caller, name: str) -> ShownUnit:
    """One unit."""
    caller.require("functions.read")
    return await _shown(conn, caller, await _found(conn, caller, name))


async def page(conn: Reader, caller: Caller, *, after: str, limit: int) -> Sequence[ShownUnit]:
    """The project's units by name."""
    caller.require("functions.read")
    found = await units.page(conn, caller.project_id, after=after, limit=limit)
    return [await _shown(conn, caller, each) for each in found]


async def delete(tx: Tx, caller: Caller, name: str) -> str | None:
    """Forget a unit, and delete its function unless another unit is the same one. The function's id if it went."""
    caller.require("functions.write")
    unit = await _found(tx, caller, name)
    await units.delete(tx, caller.project_id, name)
    await audit.record(tx, caller.actor, "functions.delete_unit", name, detail={"function": unit.function_name})
    shown = await _shown(tx, caller, unit)
    if shown.function is None or await units.others_of(tx, unit.function_id, name):
        return None
    return await use_cases.delete(tx, caller, unit.function_name)


def as_definition(body: GpuUnitCreate) -> FunctionPut:
    """The same in our own words. `packageID` is another name of the SKU."""
    if body.specName and body.packageID and body.specName != body.packageID:
        raise Invalid("specName and packageID must be the same SKU, or one of them left out", field="packageID")
    if not (sku := body.specName or body.packageID):
        raise Invalid("specName is required", field="specName")
    if body.template.args and not body.template.command:
        raise Invalid("template.args needs template.command", field="template.args")
    wanted = body.serverless
    return FunctionPut(
        sku=sku,
        image=body.image,
        command=[*body.template.command, *body.template.args],
        env=body.template.envs,
        framework=wanted.framework,
        workers_min=wanted.minAvailableCount,
        workers_max=max(_WORKERS_MAX, wanted.minAvailableCount),
        idle_s=float(wanted.idleTimeoutSeconds),
        requests_min=wanted.minRequestCount,
    )


async def _came_before(conn: Reader, caller: Caller, wanted: Operation) -> bool:
    before = await units.operation(conn, caller.project_id, wanted.body.operationID)
    if before is not None and before != wanted:
        raise OperationConflict("operationID came before with another body", field="operationID")
    return before is not None


async def _found(conn: Reader, caller: Caller, name: str) -> Unit:
    found = await units.find(conn, caller.project_id, name)
    if found is None:
        raise missing("unit", name)
    return found


async def _shown(conn: Reader, caller: Caller, unit: Unit) -> ShownUnit:
    deployed = await functions.find(conn, caller.project_id, unit.function_name)
    return ShownUnit(unit=unit, function=deployed if deployed and deployed.id == unit.function_id else None)

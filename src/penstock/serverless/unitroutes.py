"""The source's units over REST, in its envelope."""

import msgspec
from litestar import MediaType, Response, delete, get, post, put
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec

from penstock.kit import paging
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.kit.paging import PageQuery
from penstock.serverless import queries, schemas
from penstock.serverless.service import units
from penstock.serverless.service.cancel import Cancel
from penstock.serverless.service.units import Units
from penstock.wire import rest
from penstock.wire.rest import Data, GpuUnit


def handlers(db: Database, use_cases: Units, cancel: Cancel) -> list[HTTPRouteHandler]:
    """All of them."""

    @post(
        "/gpu-units",
        operation_id="createGpuUnit",
        opt={"action": "functions.write"},
        responses={200: ResponseSpec(data_container=Data[GpuUnit], generate_examples=False)},
    )
    async def create_unit(caller: Caller, data: rest.GpuUnitCreate) -> Response[Data[GpuUnit]]:
        """Define a function as the source does: 201, or 200 when the same operation came before. Units that are no
        functions are allocations here."""
        name, definition = await use_cases.check(caller, data)
        async with db.transaction() as tx:
            made, new = await use_cases.create(tx, caller, data, name, definition)
        body = msgspec.json.encode(Data(data=schemas.unit(made)))
        return Response(content=body, status_code=201 if new else 200, media_type=MediaType.JSON)  # pyright: ignore[reportReturnType]

    @get("/gpu-units", operation_id="listGpuUnits")
    async def list_units(caller: Caller, page: PageQuery) -> rest.Page[rest.GpuUnit]:
        """The project's units by name."""
        after = queries.text(page, "gu") or ""
        async with db.read() as conn:
            found = await units.page(conn, caller, after=after, limit=page.limit + 1)
        items = [schemas.unit(each) for each in found[: page.limit]]
        more = len(found) > page.limit
        return rest.Page(items=items, next_cursor=paging.encode_cursor("gu", items[-1].name) if more else None)

    @get("/gpu-units/{unit:str}", operation_id="getGpuUnit")
    async def get_unit(caller: Caller, unit: str) -> Data[GpuUnit]:
        """One unit."""
        async with db.read() as conn:
            return Data(data=schemas.unit(await units.get(conn, caller, unit)))

    @put("/gpu-units/{unit:str}", operation_id="updateGpuUnit", opt={"action": "functions.write"})
    async def update_unit(caller: Caller, unit: str, data: rest.GpuUnitCreate) -> Data[GpuUnit]:
        """Ask something else of a unit, whole: its function gets a new version. Name, SKU and `requestID` stay."""
        name, definition = await use_cases.check(caller, data)
        async with db.transaction() as tx:
            return Data(data=schemas.unit(await use_cases.update(tx, caller, unit, data, name, definition)))

    @delete("/gpu-units/{unit:str}", operation_id="deleteGpuUnit")
    async def delete_unit(caller: Caller, unit: str) -> None:
        """Delete a unit, and its function with the last unit of it."""
        async with db.transaction() as tx:
            gone = await units.delete(tx, caller, unit)
        if gone is not None:
            await cancel.drop_queue(gone)

    return [create_unit, list_units, get_unit, update_unit, delete_unit]

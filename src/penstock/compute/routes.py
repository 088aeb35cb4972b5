"""Allocations, SKUs and quotas over REST: decode, use case, encode."""

import re
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from litestar import Response, Router, delete, get, patch, post, put
from litestar.handlers import HTTPRouteHandler
from litestar.params import QueryParameter

from penstock.compute import schemas
from penstock.compute.errors import Policy
from penstock.compute.model import Limits, Shape, State
from penstock.compute.ports import Funds, Handoffs, Projects, Secrets, Users
from penstock.compute.service import catalogue, egress, read, resolutions, runtimes, stock
from penstock.compute.service.catalogue import Quotas
from penstock.compute.service.create import Create
from penstock.compute.service.read import Filter
from penstock.compute.service.release import Release
from penstock.kit import http, idempotency, paging
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Tx
from penstock.kit.errors import Invalid
from penstock.kit.idempotency import Once
from penstock.kit.paging import PageQuery
from penstock.wire import rest

_SLUG: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_LABELS_MAX: Final = 16


def router(
    funds: Funds,
    secrets: Secrets,
    handoffs: Handoffs,
    projects: Projects,
    users: Users,
    db: Database,
    *,
    limits: Limits,
    gateway_url: str,
) -> Router:
    """All routes of compute, below /api/v1."""
    create = Create(funds, secrets, handoffs, limits)
    return Router(
        path="/",
        route_handlers=[
            *_allocation_changes(create, Release(limits), db, gateway_url),
            *_allocation_reads(db, gateway_url),
            *_sku_routes(users, db),
            *_quota_routes(Quotas(projects, limits), db),
            *_runtime_routes(users, db),
            *_resolution_routes(db),
            *_egress_routes(db),
            *_stock_routes(db),
        ],
        tags=["compute"],
    )


def _allocation_changes(create: Create, release: Release, db: Database, gateway_url: str) -> Sequence[HTTPRouteHandler]:
    @post("/allocations", operation_id="createAllocation", opt={"action": "allocations.create", "denial": Policy})
    async def create_allocation(
        caller: Caller, once: Once | None, data: rest.AllocationCreate
    ) -> Response[rest.Allocation]:
        """Rent GPUs."""

        async def effect(tx: Tx) -> bytes:
            made = await create(tx, caller, data)
            return msgspec.json.encode(schemas.allocation(made, gateway_url))

        return http.created(await idempotency.run(db, once, effect))

    @patch("/allocations/{allocation_id:str}", operation_id="updateAllocation", opt={"action": "allocations.update"})
    async def update_allocation(caller: Caller, allocation_id: str, data: rest.AllocationUpdate) -> rest.Allocation:
        """Change the name or replace the labels."""
        wanted = http.path_id("alc", allocation_id)
        async with db.transaction() as tx:
            return schemas.allocation(await read.update(tx, caller, wanted, data), gateway_url)

    @post(
        "/allocations/{allocation_id:str}/release",
        operation_id="releaseAllocation",
        opt={"action": "allocations.release"},
        status_code=200,
    )
    async def release_allocation(caller: Caller, allocation_id: str, data: rest.ReleaseRequest) -> rest.Allocation:
        """Ask for the end; asking again changes nothing, and tries again what could not be released."""
        wanted = http.path_id("alc", allocation_id)
        async with db.transaction() as tx:
            moved = await release(tx, caller, wanted, data.reason)
            return schemas.allocation(moved, gateway_url)

    return [create_allocation, update_allocation, release_allocation]


def _allocation_reads(db: Database, gateway_url: str) -> Sequence[HTTPRouteHandler]:
    @get("/allocations", operation_id="listAllocations")
    async def list_allocations(
        caller: Caller,
        page: PageQuery,
        allocation_state: Annotated[str | None, QueryParameter(name="state", required=False, enum=list(State))] = None,
        sku: Annotated[str | None, QueryParameter(required=False)] = None,
        name: Annotated[str | None, QueryParameter(required=False)] = None,
        label: Annotated[
            list[str] | None, QueryParameter(required=False, description="`key=value`; may be repeated.")
        ] = None,
        ended: Annotated[
            bool | None, QueryParameter(required=False, description="false: only what has not ended; true: the rest.")
        ] = None,
    ) -> rest.Page[rest.Allocation]:
        """The project's allocations, the newest first."""
        only = Filter(state=_state(allocation_state), sku=sku, name=name, labels=_labels(label), ended=ended)
        before = _text_cursor(page, "a")
        async with db.read() as conn:
            shown = await read.page(conn, caller, only, before=before, limit=page.limit + 1)
        items = [schemas.allocation(each, gateway_url, timeline=False) for each in shown[: page.limit]]
        more = len(shown) > page.limit
        return rest.Page(items=items, next_cursor=paging.encode_cursor("a", items[-1].id) if more else None)

    @get("/allocations/{allocation_id:str}", operation_id="getAllocation")
    async def get_allocation(caller: Caller, allocation_id: str) -> rest.Allocation:
        """One allocation with its timeline."""
        wanted = http.path_id("alc", allocation_id)
        async with db.read() as conn:
            return schemas.allocation(await read.get(conn, caller, wanted), gateway_url)

    return [list_allocations, get_allocation]


def _sku_routes(users: Users, db: Database) -> Sequence[HTTPRouteHandler]:
    @get("/skus", operation_id="listSkus")
    async def list_skus(caller: Caller, page: PageQuery) -> rest.Page[rest.Sku]:
        """The offers."""
        after = _text_cursor(page, "s") or ""
        async with db.read() as conn:
            offers = await catalogue.offers(conn, caller, after=after, limit=page.limit + 1)
        items = [schemas.sku(offer) for offer in offers[: page.limit]]
        more = len(offers) > page.limit
        return rest.Page(items=items, next_cursor=paging.encode_cursor("s", items[-1].name) if more else None)

    @get("/skus/{name:str}", operation_id="getSku")
    async def get_sku(caller: Caller, name: str) -> rest.Sku:
        """One offer."""
        async with db.read() as conn:
            return schemas.sku(await catalogue.offer(conn, caller, name))

    @put("/skus/{name:str}", operation_id="putSku", opt={"action": "skus.write"})
    async def put_sku(caller: Caller, name: str, data: rest.SkuPut) -> rest.Sku:
        """Define or replace an offer; operators only."""
        if not _SLUG.fullmatch(name):
            raise Invalid("name must be a slug of max 63 characters", field="name")
        async with db.transaction() as tx:
            return schemas.sku(await catalogue.put_offer(tx, caller, name, data))

    @patch("/skus/{name:str}", operation_id="updateSku", opt={"action": "skus.write"})
    async def update_sku(caller: Caller, name: str, data: rest.SkuUpdate) -> rest.Sku:
        """Change what is given of an offer; operators only."""
        async with db.transaction() as tx:
            return schemas.sku(await catalogue.update_offer(tx, caller, name, data))

    @delete("/skus/{name:str}", operation_id="deleteSku", opt={"action": "skus.write"})
    async def delete_sku(caller: Caller, name: str) -> None:
        """Remove an offer; operators only. Refused while something that was made with it has not ended."""
        async with db.transaction() as tx:
            await catalogue.delete_offer(tx, caller, name, users)

    return [list_skus, get_sku, put_sku, update_sku, delete_sku]


def _quota_routes(quotas: Quotas, db: Database) -> Sequence[HTTPRouteHandler]:
    @get("/projects/{project_id:str}/quota", operation_id="getQuota")
    async def get_quota(caller: Caller, project_id: str) -> rest.Quota:
        """The project's limit and use."""
        wanted = http.path_id("prj", project_id)
        async with db.read() as conn:
            return schemas.quota(await quotas.read(conn, caller, wanted))

    @put("/projects/{project_id:str}/quota", operation_id="putQuota", opt={"action": "quotas.write"})
    async def put_quota(caller: Caller, project_id: str, data: rest.QuotaPut) -> rest.Quota:
        """Set the project's limit; operators only."""
        wanted = http.path_id("prj", project_id)
        async with db.transaction() as tx:
            return schemas.quota(await quotas.put(tx, caller, wanted, data))

    return [get_quota, put_quota]


def _runtime_routes(users: Users, db: Database) -> Sequence[HTTPRouteHandler]:
    @get("/runtimes", operation_id="listRuntimes")
    async def list_runtimes(caller: Caller, page: PageQuery) -> rest.Page[rest.Runtime]:
        """The project's environments, without their locks."""
        after = _text_cursor(page, "r") or ""
        async with db.read() as conn:
            shown = await runtimes.page(conn, caller, after=after, limit=page.limit + 1)
        items = [schemas.runtime(each) for each in shown[: page.limit]]
        more = len(shown) > page.limit
        return rest.Page(items=items, next_cursor=paging.encode_cursor("r", items[-1].name) if more else None)

    @get("/runtimes/{name:str}", operation_id="getRuntime")
    async def get_runtime(caller: Caller, name: str) -> rest.Runtime:
        """One environment with its lock."""
        async with db.read() as conn:
            return schemas.runtime(await runtimes.get(conn, caller, name))

    @put("/runtimes/{name:str}", operation_id="putRuntime", opt={"action": "runtimes.write"})
    async def put_runtime(caller: Caller, name: str, data: rest.RuntimePut) -> rest.Runtime:
        """Define or change an environment. Allocations keep the one that they were made with."""
        if not _SLUG.fullmatch(name):
            raise Invalid("name must be a slug of max 63 characters", field="name")
        recipe = await runtimes.check(caller, data)
        async with db.transaction() as tx:
            return schemas.runtime(await runtimes.put(tx, caller, name, recipe))

    @delete("/runtimes/{name:str}", operation_id="deleteRuntime")
    async def delete_runtime(caller: Caller, name: str) -> None:
        """Forget an environment; refused while an allocation that has not ended uses it, or a current or kept version
        of a function names it."""
        async with db.transaction() as tx:
            await runtimes.delete(tx, caller, name, users)

    return [list_runtimes, get_runtime, put_runtime, delete_runtime]


def _resolution_routes(db: Database) -> Sequence[HTTPRouteHandler]:
    @post("/resolutions", operation_id="createResolution", status_code=202, opt={"action": "runtimes.write"})
    async def create_resolution(caller: Caller, data: rest.ResolutionCreate) -> rest.Resolution:
        """Have packages by name resolved to a lock with hashes, by a node and from the operator's index. Ask for it by
        its id until its state is `succeeded` or `failed`."""
        wanted = resolutions.check(caller, data)
        async with db.transaction() as tx:
            return schemas.resolution(await resolutions.request(tx, caller, wanted, upgrade=data.upgrade))

    @get("/resolutions/{resolution_id:str}", operation_id="getResolution")
    async def get_resolution(caller: Caller, resolution_id: str) -> rest.Resolution:
        """How far a resolution is, and its lock when it succeeded."""
        wanted = http.path_id("rsl", resolution_id)
        async with db.read() as conn:
            return schemas.resolution(await resolutions.get(conn, caller, wanted))

    return [create_resolution, get_resolution]


def _egress_routes(db: Database) -> Sequence[HTTPRouteHandler]:
    @get("/egress", operation_id="getEgress")
    async def get_egress(caller: Caller) -> rest.EgressRules:
        """Where the project's units may connect to."""
        async with db.read() as conn:
            return rest.EgressRules(rules=await egress.find(conn, caller))

    @put("/egress", operation_id="putEgress", opt={"action": "egress.write"})
    async def put_egress(caller: Caller, data: rest.EgressRules) -> rest.EgressRules:
        """Set where they may connect to; for allocations that are made from now on."""
        async with db.transaction() as tx:
            return rest.EgressRules(rules=await egress.put(tx, caller, data.rules))

    return [get_egress, put_egress]


def _stock_routes(db: Database) -> Sequence[HTTPRouteHandler]:
    @get("/stock", operation_id="listStock")
    async def list_stock(caller: Caller, page: PageQuery) -> rest.Page[rest.StockFloor]:
        """The floors of warm stock and what there is; operators only."""
        after = _shape_cursor(page)
        async with db.read() as conn:
            shown = await stock.page(conn, caller, after=after, limit=page.limit + 1)
        items = [schemas.stock_floor(each) for each in shown[: page.limit]]
        if len(shown) <= page.limit:
            return rest.Page(items=items, next_cursor=None)
        last = items[-1]
        return rest.Page(items=items, next_cursor=paging.encode_cursor("f", last.sku, last.gpus, last.image))

    @put("/stock/{sku:str}", operation_id="putStock", opt={"action": "stock.write"})
    async def put_stock(caller: Caller, sku: str, data: rest.StockFloorPut) -> rest.StockFloor:
        """Set how many units of a shape are kept ready; operators only."""
        async with db.transaction() as tx:
            return schemas.stock_floor(await stock.put(tx, caller, sku, data))

    @delete("/stock/{sku:str}", operation_id="deleteStock")
    async def delete_stock(
        caller: Caller,
        sku: str,
        gpus: Annotated[int, QueryParameter(required=False, ge=1, le=1024)] = 1,
        image: Annotated[str, QueryParameter(required=False, max_length=255)] = "python:3",
    ) -> None:
        """Keep no stock of a shape any more; operators only."""
        async with db.transaction() as tx:
            await stock.remove(tx, caller, Shape(sku=sku, gpus=gpus, image=image))

    return [list_stock, put_stock, delete_stock]


def _shape_cursor(page: PageQuery) -> Shape | None:
    """The shape that the page before ended with."""
    if page.cursor is None:
        return None
    match paging.decode_cursor(page.cursor):
        case ["f", str(sku), int(gpus), str(image)]:
            return Shape(sku=sku, gpus=gpus, image=image)
        case _:
            raise Invalid("invalid cursor", field="cursor")


def _text_cursor(page: PageQuery, kind: str) -> str | None:
    """The id that the page before ended with."""
    if page.cursor is None:
        return None
    match paging.decode_cursor(page.cursor):
        case [marker, str(last)] if marker == kind:
            return last
        case _:
            raise Invalid("invalid cursor", field="cursor")


def _state(text: str | None) -> str | None:
    if text is not None and text not in frozenset(State):
        raise Invalid(f"state must be one of {', '.join(State)}", field="state")
    return text


def _labels(pairs: Sequence[str] | None) -> dict[str, str] | None:
    if not pairs:
        return None
    if len(pairs) > _LABELS_MAX:
        raise Invalid(f"label may be given at most {_LABELS_MAX} times", field="label")
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise Invalid("label must be key=value", field="label")
        found[key] = value
    return found

"""Budgets over REST. Subject and period are what makes a budget one: setting it again changes it."""

from typing import Any

import msgspec
from litestar import MediaType, Response, Router, delete, get, put

from penstock.billing.budgetmodel import Action, Budget, Period
from penstock.billing.ports import Keys
from penstock.billing.service import budgets as service
from penstock.kit import idempotency, paging
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Tx
from penstock.kit.errors import Invalid
from penstock.kit.http import path_id
from penstock.kit.idempotency import Once
from penstock.kit.paging import PageQuery
from penstock.wire import rest


def router(keys: Keys, db: Database) -> Router:
    """All routes of budgets, below /api/v1."""

    @put("/billing/budgets", operation_id="putBudget", opt={"action": "budgets.write"})
    async def put_budget(caller: Caller, once: Once | None, data: rest.BudgetPut) -> Response[rest.Budget]:
        """Set the budget of the project or of one of its keys; what was spent in the period already counts."""

        async def effect(tx: Tx) -> bytes:
            made = await service.put(
                tx,
                caller,
                keys,
                key_id=data.key_id,
                period=Period(data.period),
                limit_microusd=data.limit_microusd,
                action=Action(data.action),
            )
            return msgspec.json.encode(_shown(made))

        body: Any = await idempotency.run(db, once, effect)
        return Response(content=body, status_code=200, media_type=MediaType.JSON)

    @get("/billing/budgets", operation_id="listBudgets")
    async def list_budgets(caller: Caller, page: PageQuery) -> rest.Page[rest.Budget]:
        """The project's budgets and how they stand."""
        async with db.read() as conn:
            found = await service.page(conn, caller, after=_after(page), limit=page.limit + 1)
        items = [_shown(budget) for budget in found[: page.limit]]
        more = len(found) > page.limit
        return rest.Page(items=items, next_cursor=paging.encode_cursor("budget", items[-1].id) if more else None)

    @get("/billing/budgets/{budget_id:str}", operation_id="getBudget")
    async def get_budget(caller: Caller, budget_id: str) -> rest.Budget:
        """One budget and how it stands."""
        async with db.read() as conn:
            return _shown(await service.show(conn, caller, path_id("bdg", budget_id)))

    @delete("/billing/budgets/{budget_id:str}", operation_id="deleteBudget")
    async def delete_budget(caller: Caller, budget_id: str) -> None:
        """Delete a budget. It limits nothing any more."""
        async with db.transaction() as tx:
            await service.delete(tx, caller, path_id("bdg", budget_id))

    return Router(path="/", route_handlers=[put_budget, list_budgets, get_budget, delete_budget], tags=["billing"])


def _after(page: PageQuery) -> str:
    if page.cursor is None:
        return ""
    match paging.decode_cursor(page.cursor):
        case ["budget", str(last)]:
            return last
        case _:
            raise Invalid("invalid cursor", field="cursor")


def _shown(budget: Budget) -> rest.Budget:
    return rest.Budget(
        id=budget.id,
        project_id=budget.project_id,
        key_id=budget.key_id,
        period=budget.period,
        limit_microusd=budget.limit_microusd,
        action=budget.action,
        spent_microusd=budget.spent_microusd,
        reserved_microusd=budget.reserved_microusd + budget.held_microusd,
        remaining_microusd=max(budget.room_microusd, 0),
        period_start=budget.starts_at,
        resets_at=budget.ends_at,
        created_at=budget.created_at,
        updated_at=budget.updated_at,
    )

"""Set, show and delete budgets. Whoever may, does so for the project that they act in and for its keys."""

from penstock.billing.budgetmodel import BUDGETS_MAX, Action, Budget, Period, Setting
from penstock.billing.errors import TooManyBudgets
from penstock.billing.model import AMOUNT_MAX_MICROUSD
from penstock.billing.ports import Keys
from penstock.billing.store import budgets as store
from penstock.kit import audit
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import Invalid, missing
from penstock.kit.ids import check_id, new_id


async def put(
    tx: Tx,
    caller: Caller,
    keys: Keys,
    *,
    key_id: str | None,
    period: Period,
    limit_microusd: int,
    action: Action,
) -> Budget:
    """The one budget of this subject and period, with this limit. What was spent in the period already counts."""
    caller.require("budgets.write")
    if not 0 <= limit_microusd <= AMOUNT_MAX_MICROUSD:
        raise Invalid(f"limit_microusd must be 0 to {AMOUNT_MAX_MICROUSD}", field="limit_microusd")
    if key_id is not None and not await keys.key_exists(tx, caller.project_id, check_id("key", key_id, field="key_id")):
        raise Invalid("the project has no such key", field="key_id")
    to = Setting(
        organisation_id=caller.organisation_id,
        project_id=caller.project_id,
        key_id=key_id,
        period=period,
        limit_microusd=limit_microusd,
        action=action,
    )
    budget_id = await _set(tx, to)
    detail = {"key_id": key_id, "period": period, "limit_microusd": limit_microusd, "action": action}
    await audit.record(tx, caller.actor, "budgets.write", budget_id, detail=detail)
    return await show(tx, caller, budget_id)


async def _set(tx: Tx, to: Setting) -> str:
    """The id of the budget, changed or made."""
    if (found := await store.change(tx, to)) is not None:
        return found
    await store.await_meter(tx)
    count = await store.lock_project(tx, to.project_id)
    # Another may have made it while this one waited.
    if (found := await store.change(tx, to)) is not None:
        return found
    if count >= BUDGETS_MAX:
        raise TooManyBudgets(f"a project has at most {BUDGETS_MAX} budgets")
    budget_id = new_id("bdg")
    await store.insert(tx, budget_id, to)
    return budget_id


async def show(conn: Reader, caller: Caller, budget_id: str) -> Budget:
    """One budget as it stands."""
    caller.require("budgets.read")
    found = await store.find(conn, caller.project_id, budget_id)
    if found is None:
        raise missing("budget", budget_id)
    return found


async def page(conn: Reader, caller: Caller, *, after: str, limit: int) -> list[Budget]:
    """The project's budgets as they stand, by id."""
    caller.require("budgets.read")
    return await store.page(conn, caller.project_id, after=after, limit=limit)


async def delete(tx: Tx, caller: Caller, budget_id: str) -> None:
    """It limits nothing any more."""
    caller.require("budgets.write")
    if not await store.delete(tx, caller.project_id, budget_id):
        raise missing("budget", budget_id)
    await audit.record(tx, caller.actor, "budgets.delete", budget_id)

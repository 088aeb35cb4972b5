"""Budgets of a project and of its keys."""

from typing import Literal

from penstock.sdk.protocol import Listing, Steps, call, identifier
from penstock.sdk.resources import Resource, X, listing, operation
from penstock.wire import rest
from penstock.wire.rest import Page


class Budgets(Resource[X]):
    """What may be spent in an hour, a day or a month."""

    @operation
    def set(
        self,
        period: Literal["hourly", "daily", "monthly"],
        limit_microusd: int,
        *,
        key_id: str | None = None,
        action: Literal["reject", "warn"] = "reject",
    ) -> Steps[rest.Budget]:
        """Set the budget of the current project, or of one of its keys, for a period."""
        key = None if key_id is None else identifier("key", key_id, name="key_id")
        body = rest.BudgetPut(period=period, limit_microusd=limit_microusd, action=action, key_id=key)
        return call("PUT", "/billing/budgets", rest.Budget, body=body, create=True)

    @listing
    def list(self, *, limit: int | None = None) -> Listing[rest.Budget]:
        """The current project's budgets and how they stand."""
        return Listing(path="/billing/budgets", answer=Page[rest.Budget], limit=limit)

    @operation
    def get(self, budget_id: str) -> Steps[rest.Budget]:
        """One budget and how it stands."""
        return call("GET", _path(budget_id), rest.Budget)

    @operation
    def delete(self, budget_id: str) -> Steps[None]:
        """Delete it: it limits nothing any more."""
        return call("DELETE", _path(budget_id), type(None))


def _path(budget_id: str) -> str:
    return f"/billing/budgets/{identifier('bdg', budget_id, name='budget_id')}"

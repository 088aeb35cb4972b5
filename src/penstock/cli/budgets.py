"""Budgets: what a project or a key of it may spend in an hour, a day or a month."""

from enum import StrEnum
from typing import Annotated, Final

import typer

from penstock.cli import names
from penstock.cli.many import say_each
from penstock.cli.output import ID, Column, Format
from penstock.cli.session import Session, command, group
from penstock.cli.text import Money, microusd
from penstock.wire.rest import Budget

app = group("budget", "What may be spent in an hour, a day or a month.")

COLUMNS: list[Column[Budget]] = [
    Column("id", lambda budget: budget.id, rank=ID),
    Column("subject", lambda budget: budget.key_id or budget.project_id),
    Column("period", lambda budget: budget.period),
    Column("limit", lambda budget: Money(budget.limit_microusd), rank=ID),
    Column("spent", lambda budget: Money(budget.spent_microusd), rank=ID),
    Column("reserved", lambda budget: Money(budget.reserved_microusd)),
    Column("remaining", lambda budget: Money(budget.remaining_microusd), rank=ID),
    Column("resets at", lambda budget: budget.resets_at),
    Column("action", lambda budget: budget.action),
]

#: For a terminal: what is promised is not remaining, and a period ends with the calendar's.
LIST_TABLE: Final = [column for column in COLUMNS if column.title not in ("reserved", "resets at")]

BudgetId = Annotated[str, typer.Argument(metavar="BUDGET", help="The budget (bdg_…).")]


class Per(StrEnum):
    """Periods of the UTC calendar."""

    HOURLY = "hourly"
    DAILY = "daily"
    MONTHLY = "monthly"


@command(app, "set", example="penstock billing budget set --per monthly --limit 250")
def set_(
    session: Session,
    per: Annotated[Per, typer.Option(help="The period, by the UTC calendar.")],
    limit: Annotated[str, typer.Option(metavar="DOLLARS", help="What may be spent in it, up to six decimals.")],
    key: Annotated[str | None, typer.Option(metavar="KEY", help="Of this key only, by name or id.")] = None,
    warn: Annotated[
        bool, typer.Option("--warn", help="Only tell when it is reached; refuse and release nothing.")
    ] = False,
) -> None:
    """Set the budget of the project or of a key. What was spent in the period already counts."""
    amount = microusd(limit, field="limit")
    with session.client() as client:
        key_id = None if key is None else names.key(client, key)
        made = client.budgets.set(per.value, amount, key_id=key_id, action="warn" if warn else "reject")
    session.output.item(made, COLUMNS)


@command(app, "list", example="penstock billing budget list -o csv")
def list_(session: Session) -> None:
    """List budgets and how they stand."""
    with session.client() as client:
        columns = LIST_TABLE if session.output.format is Format.TABLE else COLUMNS
        session.output.items(client.budgets.list(), columns)


@command(app, "show", example="penstock billing budget show bdg_01k9z3v5w7x8y9z0a1b2c3d4e5")
def show(session: Session, budget: BudgetId) -> None:
    """Show one budget and how it stands."""
    with session.client() as client:
        session.output.item(client.budgets.get(budget), COLUMNS)


@command(app, "delete", example="penstock billing budget delete bdg_01k9z3v5w7x8y9z0a1b2c3d4e5")
def delete(
    session: Session,
    budgets: Annotated[list[str], typer.Argument(metavar="BUDGET…", help="The budgets' ids (bdg_…).")],
) -> None:
    """Delete budgets: they limit nothing any more."""
    with session.client() as client:

        def delete(text: str) -> str:
            client.budgets.delete(text)
            return f"deleted budget {text}"

        say_each(session, budgets, delete)

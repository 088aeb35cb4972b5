"""Prices of meters: what a unit costs, and since when."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from penstock.cli.errors import CliError
from penstock.cli.output import ID, Column
from penstock.cli.session import Session, command, group
from penstock.cli.text import Count, Money, clean, microusd
from penstock.wire.rest import Price

app = group("price", "What a unit of each meter costs.")

COLUMNS: list[Column[Price]] = [
    Column("meter", lambda price: price.meter, rank=ID),
    Column("price", lambda price: Money(price.price_microusd)),
    Column("per", lambda price: Count(price.per)),
    Column("in force", lambda price: price.in_force),
    Column("effective", lambda price: price.effective_at),
    Column("version", lambda price: price.version),
    Column("created by", lambda price: price.created_by),
]

Meter = Annotated[str, typer.Argument(help="Such as function.ms or tokens.output.")]


@command(app, "list", example="penstock billing price list")
def list_(
    session: Session,
    meter: Annotated[str | None, typer.Option(help="All versions of this meter's price instead.")] = None,
) -> None:
    """List what a unit of each meter costs now, or the history of one. Allocations cost what their SKU says."""
    with session.client() as client:
        found = client.billing.price_history(meter) if meter else client.billing.prices()
        session.output.items(found, COLUMNS)


@command(app, "set", example="penstock billing price set tokens.output 0.20 --per 1000000")
def set_(
    session: Session,
    meter: Meter,
    price: Annotated[str, typer.Argument(metavar="DOLLARS", help="What --per units cost.")],
    per: Annotated[int, typer.Option(min=1, help="For how many units the price is.")] = 1,
    effective: Annotated[
        str | None, typer.Option(metavar="TIME", help="From when on, such as 2026-12-01T00:00:00Z; default: now.")
    ] = None,
) -> None:
    """Set a price as a new version; operators only. What was metered at an earlier price keeps it."""
    with session.client() as client:
        made = client.billing.set_price(
            meter, price_microusd=microusd(price, field="price"), per=per, effective_at=_moment(effective)
        )
    session.output.item(made, COLUMNS)


def _moment(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise CliError(
            f"effective must be a time such as 2026-12-01T00:00:00Z, not {clean(text)[:40]!r}", field="effective"
        ) from error
    return at if at.tzinfo else at.replace(tzinfo=UTC)

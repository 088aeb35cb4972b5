"""What a unit of each meter costs. A price is never changed: the next version takes its place from a time on."""

import re
from datetime import timedelta
from typing import Final

from penstock.billing.store import prices
from penstock.kit import audit, paging
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import Invalid, missing
from penstock.kit.paging import PageQuery
from penstock.wire import rest

_METER: Final = re.compile(r"[a-z][a-z0-9_.]{0,62}", re.ASCII)
_ALLOCATIONS: Final = "allocation."
_AHEAD_MAX: Final = timedelta(days=3650)
_VERSION_MAX: Final = 2**31 - 1


async def put(tx: Tx, caller: Caller, meter: str, wanted: rest.PricePut) -> rest.Price:
    """The meter's next price. What is metered already at an earlier one keeps it."""
    caller.require("billing.adjust")
    if not _METER.fullmatch(meter):
        raise Invalid("meter must be 1 to 63 lower-case letters, digits, dots and underscores", field="meter")
    if meter.startswith(_ALLOCATIONS):
        raise Invalid("the time of allocations costs what their SKU says", field="meter")
    now = await tx.fetchval("select now()")
    if wanted.effective_at is not None and not now <= wanted.effective_at <= now + _AHEAD_MAX:
        raise Invalid(
            f"effective_at must not be in the past, nor more than {_AHEAD_MAX.days} days ahead", field="effective_at"
        )
    await prices.lock_meter(tx, meter)
    version = await prices.add(
        tx,
        meter,
        price_microusd=wanted.price_microusd,
        per=wanted.per,
        effective_at=wanted.effective_at,
        created_by=caller.principal_id,
    )
    [made] = await prices.history(tx, meter, before=version + 1, limit=1)
    detail = {
        "version": version,
        "price_microusd": made.price_microusd,
        "per": made.per,
        "effective_at": made.effective_at.isoformat(),
    }
    await audit.record(tx, caller.actor, "billing.price", meter, detail=detail)
    return made


async def listed(conn: Reader, caller: Caller, page: PageQuery) -> rest.Page[rest.Price]:
    """The price of every meter, by meter."""
    caller.require("usage.read")
    found = await prices.present(conn, after=_after(page), limit=page.limit + 1)
    items = found[: page.limit]
    more = len(found) > page.limit
    return rest.Page(items=items, next_cursor=paging.encode_cursor("price", items[-1].meter) if more else None)


async def history(conn: Reader, caller: Caller, meter: str, page: PageQuery) -> rest.Page[rest.Price]:
    """All versions of a meter's price, newest first."""
    caller.require("usage.read")
    if not _METER.fullmatch(meter):
        raise missing("price of the meter", meter)
    found = await prices.history(conn, meter, before=_before(page), limit=page.limit + 1)
    if not found and page.cursor is None:
        raise missing("price of the meter", meter)
    items = found[: page.limit]
    more = len(found) > page.limit
    return rest.Page(items=items, next_cursor=paging.encode_cursor("version", items[-1].version) if more else None)


def _after(page: PageQuery) -> str:
    if page.cursor is None:
        return ""
    match paging.decode_cursor(page.cursor):
        case ["price", str(meter)]:
            return meter
        case _:
            raise Invalid("invalid cursor", field="cursor")


def _before(page: PageQuery) -> int:
    if page.cursor is None:
        return _VERSION_MAX
    match paging.decode_cursor(page.cursor):
        case ["version", int(version)] if 0 < version <= _VERSION_MAX:
            return version
        case _:
            raise Invalid("invalid cursor", field="cursor")

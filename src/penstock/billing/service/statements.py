"""An organisation's transfers, one after the other, with what there was before and after each.

All pages of a reading are of the moment of its first: what is posted meanwhile is on none of them, so that they sum.
"""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from penstock.billing.periods import Period
from penstock.billing.store import statements
from penstock.billing.store.statements import Place
from penstock.kit import paging
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Reader, Tx
from penstock.kit.errors import Invalid, missing
from penstock.kit.paging import PageQuery
from penstock.wire import rest
from penstock.wire.rest import Funds

TRANSFER_ID_CHARS_MAX: Final = 200
USAGE_MAX: Final = 200
CORRECTIONS_MAX: Final = 100
EXPORT_ROWS: Final = 1000
#: Of a longer one only the ends are kept: a cursor has a limit, and so many rarely write at once.
_SNAPSHOT_CHARS_MAX: Final = 200
_SNAPSHOT: Final = re.compile(r"([1-9][0-9]{0,17}):([1-9][0-9]{0,17}):([0-9,]*)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How far a statement was read. What it began and ends with is that of the first page, so that pages fit."""

    opening: Funds
    closing: Funds
    place: Place
    snapshot: str

    def cursor(self) -> str:
        """The same as text."""
        numbers = [number for funds in (self.opening, self.closing, self.place.funds) for number in _numbers(funds)]
        return paging.encode_cursor(
            "statement", self.place.at.isoformat(), self.place.transfer_id, self.snapshot, *numbers
        )

    @classmethod
    def of(cls, cursor: str) -> "Reading":
        """What `cursor` says, or Invalid."""
        match paging.decode_cursor(cursor):
            case ["statement", str(at), str(transfer_id), str(snapshot), *numbers] if len(numbers) == 9:
                opening, closing, funds = (_funds(numbers[start : start + 3]) for start in (0, 3, 6))
                place = Place(at=_moment(at), transfer_id=transfer_id, funds=funds)
                return cls(opening=opening, closing=closing, place=place, snapshot=_checked(snapshot))
            case _:
                raise Invalid("invalid cursor", field="cursor")


def _numbers(funds: Funds) -> tuple[int, int, int]:
    return funds.balance_microusd, funds.credit_microusd, funds.holds_microusd


def _funds(numbers: list[str | int]) -> Funds:
    match numbers:
        case [int(balance), int(credit), int(holds)]:
            return Funds(balance_microusd=balance, credit_microusd=credit, holds_microusd=holds)
        case _:
            raise Invalid("invalid cursor", field="cursor")


def _checked(snapshot: str) -> str:
    """A snapshot that the database can read, or Invalid."""
    match = _SNAPSHOT.fullmatch(snapshot)
    running = [] if match is None or not match[3] else match[3].split(",")
    if match is None or len(snapshot) > _SNAPSHOT_CHARS_MAX or not all(1 <= len(each) <= 18 for each in running):
        raise Invalid("invalid cursor", field="cursor")
    first, last, inside = int(match[1]), int(match[2]), [int(each) for each in running]
    if first > last or inside != sorted(set(inside)) or any(not first <= each < last for each in inside):
        raise Invalid("invalid cursor", field="cursor")
    return snapshot


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise Invalid("invalid cursor", field="cursor") from error
    if moment.tzinfo is None or not 1970 <= moment.year <= 3000:
        raise Invalid("invalid cursor", field="cursor")
    return moment


async def statement(tx: Tx, caller: Caller, period: Period, page: PageQuery) -> rest.Statement:
    """A page of it. The transaction is this question's own: all of it is of one moment."""
    caller.require("billing.read")
    await tx.execute("set transaction isolation level repeatable read, read only")
    organisation_id = caller.organisation_id
    reading = Reading.of(page.cursor) if page.cursor else await _begin(tx, organisation_id, period)
    lines = await statements.page(
        tx,
        organisation_id,
        period.since,
        period.until,
        after=reading.place,
        snapshot=reading.snapshot,
        limit=page.limit + 1,
    )
    shown = lines[: page.limit]
    more = len(lines) > page.limit
    return rest.Statement(
        organisation_id=organisation_id,
        from_day=period.from_day,
        to_day=period.to_day,
        opening=reading.opening,
        closing=reading.closing,
        items=shown,
        next_cursor=_later(reading, shown[-1]).cursor() if more else None,
    )


async def _begin(conn: Reader, organisation_id: str, period: Period) -> Reading:
    opening, closing = await statements.bounds(conn, organisation_id, period.since, period.until)
    place = Place(at=period.since, transfer_id="", funds=opening)
    snapshot = await statements.snapshot(conn, chars_max=_SNAPSHOT_CHARS_MAX)
    return Reading(opening=opening, closing=closing, place=place, snapshot=snapshot)


def _later(reading: Reading, line: rest.StatementLine) -> Reading:
    place = Place(at=line.at, transfer_id=line.transfer_id, funds=line.after)
    return replace(reading, place=place)


async def export(db: Database, caller: Caller, period: Period) -> AsyncIterator[list[rest.StatementLine]]:
    """All of it in pieces; between them no connection is held, however slowly somebody reads."""
    cursor: str | None = None
    while True:
        async with db.transaction() as tx:
            page = await statement(tx, caller, period, PageQuery(limit=EXPORT_ROWS, cursor=cursor))
        yield page.items
        cursor = page.next_cursor
        if cursor is None:
            return


async def transfer(conn: Reader, caller: Caller, transfer_id: str) -> rest.LedgerTransfer:
    """One transfer of the caller's organisation."""
    caller.require("billing.read")
    return await show(conn, caller.organisation_id, transfer_id)


async def show(conn: Reader, organisation_id: str, transfer_id: str) -> rest.LedgerTransfer:
    """One transfer of an organisation, or NotFound."""
    found = None
    if len(transfer_id) <= TRANSFER_ID_CHARS_MAX and "\0" not in transfer_id:
        found = await statements.find(
            conn, organisation_id, transfer_id, usage_max=USAGE_MAX, corrections_max=CORRECTIONS_MAX
        )
    if found is None:
        raise missing("transfer", transfer_id)
    return found

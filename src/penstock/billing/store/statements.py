"""Transfers as the organisation sees them, in the order of their making."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from penstock.kit.db import Reader, Row
from penstock.wire.rest import Funds, LedgerEntry, LedgerTransfer, StatementLine, UsageWindow

#: What a query says of an organisation's three accounts, as changes by `e`.
_CHANGES: Final = ", ".join(
    f"coalesce(sum(e.amount_microusd) filter (where e.account_id = $1 || '/{kind}' {{only}}), 0)::bigint"
    f" as {kind}{{suffix}}"
    for kind in ("balance", "credit", "holds")
)
_BOUNDS: Final = f"""
    select billing.balance_of($1 || '/balance') as balance_now, billing.balance_of($1 || '/credit') as credit_now,
        billing.balance_of($1 || '/holds') as holds_now,
        {_CHANGES.format(only="", suffix="_since")}, {_CHANGES.format(only="and t.at >= $3", suffix="_later")}
    from billing.transfers t join billing.entries e on e.transfer_id = t.id
    where t.organisation_id = $1 and t.at >= $2
"""  # noqa: S608
_PAGE: Final = f"""
    select t.id, t.kind, t.at, t.memo, t.corrects, t.window_start, t.correlation_id,
        {_CHANGES.format(only="", suffix="")}
    from (
        select * from billing.transfers
        where organisation_id = $1 and at >= $2 and at < $3 and (at, id) > ($4, $5) and pg_visible_in_snapshot(
            (select tx from billing.entries where transfer_id = transfers.id limit 1), $7::text::pg_snapshot)
        order by at, id limit $6
    ) t left join billing.entries e on e.transfer_id = t.id
    group by t.id, t.kind, t.at, t.memo, t.corrects, t.window_start, t.correlation_id order by t.at, t.id
"""  # noqa: S608


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """After which transfer to go on, and what there was after it."""

    at: datetime
    transfer_id: str
    funds: Funds


async def bounds(conn: Reader, organisation_id: str, since: datetime, until: datetime) -> tuple[Funds, Funds]:
    """What there was when the time began and when it ended: what there is now, less what came since."""
    row = await conn.fetchrow(_BOUNDS, organisation_id, since, until)
    assert row is not None
    return _less(row, "_since"), _less(row, "_later")


def _less(row: Row, part: str) -> Funds:
    return Funds(
        balance_microusd=row["balance_now"] - row[f"balance{part}"],
        credit_microusd=row["credit_now"] - row[f"credit{part}"],
        holds_microusd=row["holds_now"] - row[f"holds{part}"],
    )


async def snapshot(conn: Reader, *, chars_max: int) -> str:
    """Which transactions are seen now; of a long list of those that still run only its ends."""
    text: str = await conn.fetchval("select pg_current_snapshot()::text")
    return text if len(text) <= chars_max else text[: text.rindex(":") + 1]


async def page(
    conn: Reader, organisation_id: str, since: datetime, until: datetime, *, after: Place, snapshot: str, limit: int
) -> list[StatementLine]:
    """The next transfers that the snapshot sees, each with what there is after it."""
    rows = await conn.fetch(_PAGE, organisation_id, since, until, after.at, after.transfer_id, limit, snapshot)
    lines: list[StatementLine] = []
    funds = after.funds
    for row in rows:
        change = Funds(balance_microusd=row["balance"], credit_microusd=row["credit"], holds_microusd=row["holds"])
        funds = plus(funds, change)
        lines.append(_line(row, change, funds))
    return lines


def plus(one: Funds, other: Funds) -> Funds:
    """The sum, account by account."""
    return Funds(
        balance_microusd=one.balance_microusd + other.balance_microusd,
        credit_microusd=one.credit_microusd + other.credit_microusd,
        holds_microusd=one.holds_microusd + other.holds_microusd,
    )


def _line(row: Row, change: Funds, after: Funds) -> StatementLine:
    return StatementLine(
        transfer_id=row["id"],
        kind=row["kind"],
        at=row["at"],
        memo=row["memo"],
        corrects=row["corrects"],
        window_start=row["window_start"],
        correlation_id=row["correlation_id"],
        change=change,
        after=after,
    )


async def owner(conn: Reader, transfer_id: str) -> tuple[str, str] | None:
    """Whose transfer it is, and of which kind."""
    row = await conn.fetchrow("select organisation_id, kind from billing.transfers where id = $1", transfer_id)
    return (row["organisation_id"], row["kind"]) if row else None


async def find(
    conn: Reader, organisation_id: str, transfer_id: str, *, usage_max: int, corrections_max: int
) -> LedgerTransfer | None:
    """One transfer of the organisation with everything that belongs to it."""
    row = await conn.fetchrow(
        "select * from billing.transfers where id = $1 and organisation_id = $2", transfer_id, organisation_id
    )
    if row is None:
        return None
    entries = await conn.fetch(
        "select account_id, amount_microusd from billing.entries where transfer_id = $1 order by seq", transfer_id
    )
    corrections = await conn.fetch(
        "select id from billing.transfers where corrects = $1 order by at, id limit $2", transfer_id, corrections_max
    )
    windows = await _windows(conn, row, usage_max) if row["kind"] == "usage" else []
    return LedgerTransfer(
        id=row["id"],
        kind=row["kind"],
        organisation_id=row["organisation_id"],
        at=row["at"],
        memo=row["memo"],
        corrects=row["corrects"],
        corrected_by=[each["id"] for each in corrections],
        window_start=row["window_start"],
        run_at=row["run_at"],
        correlation_id=row["correlation_id"],
        entries=[LedgerEntry(account_id=each[0], amount_microusd=each[1]) for each in entries],
        usage=[_window(each) for each in windows],
        usage_count=windows[0]["total"] if windows else 0,
    )


async def _windows(conn: Reader, transfer: Row, limit: int) -> Sequence[Row]:
    return await conn.fetch(
        """
        select s.project_id, s.resource_kind, s.resource_id, s.meter, s.detail, s.gpus, s.price_microusd, s.per,
            u.from_at, u.until_at, u.quantity, u.amount_microusd, count(*) over () as total
        from billing.usage u join billing.series s on s.id = u.series_id
        where u.window_start = $1 and u.nth = 0 and u.run_at = $2 and s.organisation_id = $3
        order by u.amount_microusd desc, u.series_id limit $4
        """,
        transfer["window_start"],
        transfer["run_at"],
        transfer["organisation_id"],
        limit,
    )


def _window(row: Row) -> UsageWindow:
    return UsageWindow(
        project_id=row["project_id"],
        resource_kind=row["resource_kind"],
        resource_id=row["resource_id"],
        meter=row["meter"],
        sku=row["detail"],
        gpus=row["gpus"],
        from_at=row["from_at"],
        until_at=row["until_at"],
        quantity=row["quantity"],
        price_microusd=row["price_microusd"],
        per=row["per"],
        amount_microusd=row["amount_microusd"],
    )

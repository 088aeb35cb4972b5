"""What an organisation has, how long that lasts, and what its money goes to."""

from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import Final

from penstock.billing.model import INITIAL, Standing
from penstock.billing.periods import Period
from penstock.billing.service import standing
from penstock.billing.store import costs
from penstock.billing.store.costs import GROUPS, Place, Scope
from penstock.kit import paging
from penstock.kit.caller import Caller
from penstock.kit.db import Reader
from penstock.kit.errors import Invalid, missing
from penstock.kit.paging import PageQuery
from penstock.wire import rest

LABEL_CHARS_MAX: Final = 63
_LABEL: Final = "label:"
#: In the first minutes of a day its average says nothing: it is taken over no less than this.
_AVERAGED_S_MIN: Final = 3600.0


async def balance(conn: Reader, caller: Caller) -> rest.Balance:
    """How the caller's organisation stands."""
    caller.require("billing.read")
    found = await standing.find(conn, caller.organisation_id) or await _nothing(conn, caller.organisation_id)
    metered = await _metered_per_hour(conn, found)
    rate = found.burn_microusd_per_hour + metered
    lasts_s = max(found.available_microusd, 0) * 3600 / rate if rate > 0 else None
    return rest.Balance(
        organisation_id=found.organisation_id,
        state=found.state,
        available_microusd=found.available_microusd,
        balance_microusd=found.balance_microusd,
        credit_microusd=found.credit_microusd,
        holds_microusd=found.holds_microusd,
        credit_limit_microusd=found.credit_limit_microusd,
        burn_microusd_per_hour=found.burn_microusd_per_hour,
        metered_microusd_per_hour=metered,
        lasts_s=lasts_s,
        ends_at=_ends_at(found.now, lasts_s),
        accrued_until=found.accrued_until,
        at=found.now,
    )


async def _nothing(conn: Reader, organisation_id: str) -> Standing:
    """The standing of whoever never had or owed anything."""
    return Standing(
        organisation_id=organisation_id,
        state=INITIAL,
        version=0,
        balance_microusd=0,
        credit_microusd=0,
        holds_microusd=0,
        credit_limit_microusd=0,
        burn_microusd_per_hour=0,
        unbilled_microusd=0,
        accrued_until=await costs.accrued_until(conn),
        now=await conn.fetchval("select clock_timestamp()"),
    )


async def _metered_per_hour(conn: Reader, found: Standing) -> int:
    """Today's average of what is not time."""
    today = found.now.astimezone(UTC).date()
    spent = await costs.metered_on(conn, found.organisation_id, today)
    passed_s = (found.now - datetime.combine(today, time.min, UTC)).total_seconds()
    return round(spent * 3600 / max(passed_s, _AVERAGED_S_MIN))


def _ends_at(now: datetime, lasts_s: float | None) -> datetime | None:
    """None for what lies beyond all calendars."""
    if lasts_s is None:
        return None
    try:
        return now + timedelta(seconds=round(lasts_s))
    except OverflowError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """By what costs are grouped."""

    by: str
    label: str | None = None

    @classmethod
    def of(cls, text: str) -> "Grouping":
        """What was asked for, or Invalid."""
        if text.startswith(_LABEL) and 1 <= len(name := text.removeprefix(_LABEL)) <= LABEL_CHARS_MAX:
            if "\0" not in name:
                return cls(by="label", label=name)
        elif text in GROUPS and text != "label":
            return cls(by=text)
        known = ", ".join(name for name in GROUPS if name != "label")
        raise Invalid(f"group_by must be one of {known}, or label:<name>", field="group_by")


async def usage(
    conn: Reader, caller: Caller, period: Period, group_by: str, project_id: str | None, page: PageQuery
) -> rest.CostReport:
    """What was used and what it cost. Without the right to see the organisation's money, the caller's project only."""
    caller.require("usage.read")
    scope = Scope(
        organisation_id=caller.organisation_id,
        project_id=_project(caller, project_id),
        from_day=period.from_day,
        to_day=period.to_day,
    )
    grouping = Grouping.of(group_by)
    total, found = await costs.report(
        conn, scope, grouping.by, grouping.label, after=_after(page), limit=page.limit + 1
    )
    shown = found[: page.limit]
    more = len(found) > page.limit
    return rest.CostReport(
        from_day=period.from_day,
        to_day=period.to_day,
        group_by=group_by,
        project_id=scope.project_id,
        total_microusd=total,
        items=[cost for _, cost in shown],
        next_cursor=paging.encode_cursor("cost", shown[-1][0].rank, shown[-1][0].group) if more else None,
    )


def _project(caller: Caller, asked: str | None) -> str | None:
    if "billing.read" in caller.actions:
        return asked
    if asked is not None and asked != caller.project_id:
        raise missing("project", asked)
    return caller.project_id


def _after(page: PageQuery) -> Place | None:
    if page.cursor is None:
        return None
    match paging.decode_cursor(page.cursor):
        case ["cost", int(rank), str(group)]:
            return Place(rank=rank, group=group)
        case _:
            raise Invalid("invalid cursor", field="cursor")

"""What people see of what they have and what it goes to."""

from datetime import UTC, datetime, timedelta

import pytest

from integration.billing.people import costs_of, days, move, someone
from integration.billing.stage import HOUR, MINUTE, PRICE, T0, Stage
from penstock.billing.service import costs
from penstock.identity.model import Role
from penstock.kit.db import Database
from penstock.kit.errors import Denied, Invalid, NotFound
from penstock.wire import rest

TODAY = days(T0.date(), T0.date())
ORG = "org_a"
EUROPE, ASIA = f"prj_{'e' * 26}", f"prj_{'a' * 26}"


async def balance_of(db: Database, org: str = ORG) -> rest.Balance:
    async with db.read() as conn:
        return await costs.balance(conn, someone(Role.BILLING, org=org))


async def test_whoever_never_had_anything_has_nothing(stage: Stage) -> None:
    found = await balance_of(stage.db, "org_new")
    assert (found.state, found.available_microusd, found.balance_microusd) == ("depleted", 0, 0)
    assert (found.burn_microusd_per_hour, found.lasts_s, found.ends_at) == (0, None, None)


async def test_the_forecast_counts_what_runs_and_todays_average_of_the_rest(stage: Stage) -> None:
    await stage.customer(paid=100_000_000, granted=20_000_000)
    now: datetime = await stage.value("select clock_timestamp()")
    minute = now.replace(second=0, microsecond=0)
    await stage.begin(minute - 2 * MINUTE)
    await stage.start(minute - MINUTE, price=6_000_000)
    await stage.record(3, minute - MINUTE, price=1_000_000, per=1)
    await stage.accrue(minute)
    found = await balance_of(stage.db)
    assert found.credit_microusd == 20_000_000 - 3_000_000 - 100_000
    assert found.balance_microusd == 100_000_000
    assert found.burn_microusd_per_hour == 6_000_000
    passed_h = max((found.at - found.at.replace(hour=0, minute=0, second=0, microsecond=0)) / HOUR, 1)
    if (minute - MINUTE).date() == found.at.date():  # the usage is today's, unless midnight has just passed
        assert found.metered_microusd_per_hour == pytest.approx(3_000_000 / passed_h, abs=1)
    rate = found.burn_microusd_per_hour + found.metered_microusd_per_hour
    assert found.lasts_s == pytest.approx(found.available_microusd * 3600 / rate)
    assert found.ends_at is not None
    assert found.lasts_s is not None
    assert abs(found.ends_at - found.at - timedelta(seconds=found.lasts_s)) < timedelta(seconds=1)


async def test_only_those_who_may_read_billing_see_the_balance(stage: Stage) -> None:
    for role in (Role.VIEWER, Role.DEVELOPER):
        async with stage.db.read() as conn:
            with pytest.raises(Denied):
                await costs.balance(conn, someone(role))


async def two_projects(stage: Stage) -> None:
    """An hour in Europe at the list's price, two in Asia at one dollar, and a function."""
    await stage.customer(paid=100_000_000)
    in_europe = await stage.start(T0, end=T0 + HOUR)
    await move(stage, in_europe, project=EUROPE, key="key_1", team="vision")
    in_asia = await stage.start(T0, end=T0 + 2 * HOUR, price=1_000_000)
    await move(stage, in_asia, project=ASIA, team="speech")
    await stage.record(250, T0, price=4, per=10)
    await stage.start(T0, end=T0 + HOUR, org="org_b")
    await stage.catch_up(T0 + 3 * HOUR)


#: What `two_projects` costs by group.
GROUPED: dict[str, dict[str, int]] = {
    "project": {EUROPE: PRICE, ASIA: 2_000_000, "prj_org_a": 100},
    "sku": {"g1.1": PRICE + 2_000_000},
    "meter": {"allocation.interactive": PRICE + 2_000_000, "function.ms": 100},
    "key": {"key_1": PRICE, "": 2_000_100},
    "label:team": {"vision": PRICE, "speech": 2_000_000, "": 100},
    "label:none": {"": PRICE + 2_000_100},
    "function": {"fn": 100},
    "deployment": {},
    "day": {"2026-01-05": PRICE + 2_000_100},
}


async def test_costs_are_grouped_exactly_and_other_groups_refused(stage: Stage) -> None:
    await two_projects(stage)
    for by, expected in GROUPED.items():
        report = await costs_of(stage, TODAY, by)
        assert {cost.group: cost.amount_microusd for cost in report.items} == expected, by
        assert [cost.amount_microusd for cost in report.items] == sorted(expected.values(), reverse=True), by
        assert report.total_microusd == sum(expected.values()), by
    for by in ("", "label", "label:", "projects", "label:" + "a" * 64, "label:\0", "s.id; drop"):
        with pytest.raises(Invalid, match="group_by must be one of"):
            await costs_of(stage, TODAY, by)


async def test_quantities_are_by_meter_and_days_in_order(stage: Stage) -> None:
    await two_projects(stage)
    [cost] = (await costs_of(stage, TODAY, "project", project=EUROPE)).items
    assert cost.quantities == {"allocation.interactive": 3_600_000_000}
    run = await stage.start(T0 + 3 * HOUR, end=T0 + 27 * HOUR, price=10)
    await stage.catch_up(T0 + 28 * HOUR)
    report = await costs_of(stage, days(T0.date(), T0.date() + timedelta(days=2)), "day")
    assert [cost.group for cost in report.items] == ["2026-01-05", "2026-01-06"]
    assert sum(cost.amount_microusd for cost in report.items) == PRICE + 2_000_100 + await stage.charged(run.id)


async def test_pages_of_costs_join_without_gap_or_overlap(stage: Stage) -> None:
    await stage.customer(paid=1_000_000)
    for price in (60, 60, 120, 180, 240):
        await stage.start(T0, end=T0 + HOUR, price=price)
    await stage.catch_up(T0 + HOUR)
    whole = await costs_of(stage, TODAY, "allocation")
    groups: list[str] = []
    cursor: str | None = None
    while cursor is not None or not groups:
        page = await costs_of(stage, TODAY, "allocation", limit=2, cursor=cursor)
        assert page.total_microusd == 660
        groups += [cost.group for cost in page.items]
        cursor = page.next_cursor
    assert groups == [cost.group for cost in whole.items]
    assert len(groups) == 5


async def test_a_viewer_sees_their_own_project_and_nobody_anothers_organisation(stage: Stage) -> None:
    await two_projects(stage)
    viewer = someone(Role.VIEWER, project=EUROPE)
    for project in (None, EUROPE):
        report = await costs_of(stage, TODAY, "project", caller=viewer, project=project)
        assert [cost.group for cost in report.items] == [EUROPE]
        assert report.total_microusd == PRICE
    for other in (ASIA, "prj_org_b", "nonsense"):
        with pytest.raises(NotFound):
            await costs_of(stage, TODAY, "project", caller=viewer, project=other)
    report = await costs_of(stage, TODAY, "project", project="prj_org_b")
    assert (report.items, report.total_microusd) == ([], 0)
    assert "prj_org_b" not in str(await costs_of(stage, TODAY, "project"))


async def test_a_window_belongs_to_the_day_in_which_it_began(database: Database) -> None:
    midnight = datetime(2026, 2, 1, tzinfo=UTC)
    stage = Stage(database, window=timedelta(minutes=7))
    await stage.begin(midnight - HOUR)
    await stage.customer(paid=10_000_000)
    run = await stage.start(midnight - HOUR, end=midnight + HOUR, price=7_200_007)
    await stage.catch_up(midnight + 2 * HOUR)
    crossing = await stage.rows(
        "select window_start, until_at from billing.usage where window_start < $1 and until_at > $1", midnight
    )
    assert len(crossing) == 1
    january = await costs_of(stage, days(midnight.date() - timedelta(days=31), midnight.date() - timedelta(days=1)))
    february = await costs_of(stage, days(midnight.date(), midnight.date()))
    assert january.total_microusd + february.total_microusd == run.cost(midnight + HOUR)
    assert january.items[0].quantities == {
        "allocation.interactive": (crossing[0]["until_at"] - run.active_at) // timedelta(microseconds=1)
    }

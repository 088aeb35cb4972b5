"""Usage of other domains: one contract of facts, each key once, rated at the price of its time."""

from datetime import UTC, datetime, timedelta
from typing import Any

from integration.billing.stage import Stage
from penstock.billing.service.metering import FACT, Metering
from penstock.kit import outbox
from penstock.kit.outbox import Event

PRICE = "insert into billing.prices (meter, version, price_microusd, per, effective_at, created_by) values"


async def _price(stage: Stage, *, version: int = 1, price: int = 200, per: int = 1000, at: datetime) -> None:
    async with stage.db.transaction() as tx:
        await tx.execute(f"{PRICE} ('tokens', $1, $2, $3, $4, 'usr_default')", version, price, per, at)


async def _use(
    stage: Stage, key: str, *, event: str = "", org: str | None = "org_a", project: str = "prj_a", **changed: Any
) -> None:
    """The fact as a domain writes it."""
    payload = {
        "key": key,
        "meter": "tokens",
        "quantity": 1,
        "resource_kind": "deployment",
        "resource_id": "dep_1",
        "occurred_at": datetime.now(UTC),
        **changed,
    }
    fact = Event(
        type=FACT,
        aggregate_id=f"use/{project}/{event or key}",
        version=1,
        organisation_id=org,
        project_id=project if org else None,
        payload=payload,
    )
    async with stage.db.transaction() as tx:
        await outbox.append(tx, fact)


async def _states(stage: Stage) -> dict[str, tuple[str, str]]:
    rows = await stage.rows("select key, state, reason from billing.recorded")
    return {row["key"]: (row["state"], row["reason"]) for row in rows}


async def test_uses_below_a_micro_dollar_add_up_exactly(stage: Stage) -> None:
    await _price(stage, at=datetime.now(UTC) - timedelta(hours=1))
    begun = datetime.now(UTC).replace(microsecond=0)
    for batch in range(3):
        for n in range(7):
            await _use(stage, f"{batch}/{n}", quantity=3)
        await Metering(stage.db).sweep()
        await stage.begin(begun + timedelta(minutes=batch))
        await stage.accrue(begun + timedelta(minutes=batch + 2))
    # 63 tokens at 0.2 micro-dollars are 12.6: twelve whole ones.
    assert await stage.value("select sum(amount_microusd) from billing.usage") == 12
    assert await stage.value("select quantity from billing.series") == 63
    assert await stage.balance() == -12


async def test_the_same_key_counts_once(stage: Stage) -> None:
    await _price(stage, at=datetime.now(UTC) - timedelta(hours=1))
    for event in ("one", "two"):
        await _use(stage, "the-key", event=event, quantity=5000)
    await Metering(stage.db).sweep()
    await Metering(stage.db).sweep()
    assert await stage.value("select sum(quantity)::int from billing.recorded") == 5000


async def test_another_project_may_have_the_same_key(stage: Stage) -> None:
    begun = datetime.now(UTC).replace(microsecond=0)
    await _price(stage, at=begun - timedelta(hours=1))
    await _use(stage, "the-key", quantity=5000)
    await _use(stage, "the-key", org="org_b", project="prj_b", quantity=15000)
    await Metering(stage.db).sweep()
    await stage.begin(begun)
    await stage.accrue(begun + timedelta(minutes=2))
    assert [await stage.balance(org) for org in ("org_a", "org_b")] == [-1000, -3000]


async def test_a_use_is_rated_at_the_price_of_its_time(stage: Stage) -> None:
    change = datetime.now(UTC) - timedelta(hours=1)
    await _price(stage, at=change - timedelta(days=1))
    await _price(stage, version=2, price=900, at=change)
    await _use(stage, "old", occurred_at=change - timedelta(minutes=1))
    await _use(stage, "new", occurred_at=change + timedelta(minutes=1))
    await Metering(stage.db).sweep()
    rows = await stage.rows("select price_microusd from billing.series order by 1")
    assert [row["price_microusd"] for row in rows] == [200, 900]


async def test_what_cannot_be_rated_is_kept_with_the_reason_and_holds_nothing_up(stage: Stage) -> None:
    await _price(stage, at=datetime.now(UTC) - timedelta(hours=1))
    await _use(stage, "early", occurred_at=datetime.now(UTC) - timedelta(days=9))
    await _use(stage, "unknown", meter="smoke")
    await _use(stage, "negative", quantity=-1)
    await _use(stage, "huge", quantity=1 << 60)
    await _use(stage, "dear", quantity=10**15 - 1)
    await _use(stage, "timeless", occurred_at="2026-01-05T10:00:00")
    await _use(stage, "long", key_id="k" * 3000)
    await _use(stage, "crooked", resource_kind="deployment/dep_1")
    await _use(stage, "nobody", org=None)
    await _use(stage, "good")
    await Metering(stage.db).sweep()
    found = await _states(stage)
    assert found["good"] == ("pending", "")
    assert found["early"] == ("refused", "meter tokens had no price then")
    assert found["dear"] == ("refused", "it would cost $199,999,999.999999: more than $1,000,000.00 at once")
    assert found["unknown"] == ("refused", "meter smoke had no price then")
    assert sorted(state for state, _ in found.values()) == ["pending"] + ["refused"] * 9


async def test_the_dearest_use_of_all_can_be_charged(stage: Stage) -> None:
    await _price(stage, price=10**12, per=1, at=datetime.now(UTC) - timedelta(hours=1))
    begun = datetime.now(UTC).replace(microsecond=0)
    await _use(stage, "most", quantity=1)
    await _use(stage, "too-much", quantity=2)
    await Metering(stage.db).sweep()
    await stage.begin(begun)
    await stage.accrue(begun + timedelta(minutes=2))
    assert await stage.balance() == -(10**12)
    assert (await _states(stage))["too-much"][0] == "refused"


async def test_a_fact_that_commits_late_is_not_passed_by(stage: Stage) -> None:
    await _price(stage, at=datetime.now(UTC) - timedelta(hours=1))
    async with stage.db.transaction() as late:
        await late.execute("select pg_current_xact_id()")
        await _use(stage, "early")
        await Metering(stage.db).sweep()
        assert await _states(stage) == {}
        await outbox.append(
            late,
            Event(
                type=FACT,
                aggregate_id="use/prj_a/late",
                version=1,
                organisation_id="org_a",
                project_id="prj_a",
                payload={
                    "key": "late",
                    "meter": "tokens",
                    "quantity": 1,
                    "resource_kind": "deployment",
                    "resource_id": "dep_1",
                    "occurred_at": datetime.now(UTC),
                },
            ),
        )
    await Metering(stage.db).sweep()
    assert set(await _states(stage)) == {"early", "late"}

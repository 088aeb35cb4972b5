"""What happens by itself: schedules fire once, old things go with their objects, time used becomes facts of billing."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from integration.billing.people import costs_of, lately, someone
from integration.billing.stage import Stage as Ledger
from integration.serverless.stage import Shelf, Stage
from penstock.billing.service.metering import Metering as BillingMetering
from penstock.identity.model import Role
from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.serverless.model import Limits
from penstock.serverless.service import schedules
from penstock.serverless.service.schedules import Schedules
from penstock.serverless.upkeep import Metering, Upkeep
from penstock.wire.catalogue import UsageFact
from penstock.wire.rest import FunctionPut, ScheduleUse

LIMITS = Limits(keep_results_s=1000, keep_outputs_s=500)


@pytest.fixture
def stage(database: Database, nats_bus: Bus) -> Stage:
    """No loop runs: tests call the sweeps."""
    return Stage(database, nats_bus)


async def rows(stage: Stage, query: str, *args: object) -> list[Any]:
    async with stage.db.read() as conn:
        return await conn.fetch(query, *args)


async def test_a_schedule_fires_once_and_missed_times_are_one(stage: Stage) -> None:
    function_id = await stage.define("nightly")
    async with stage.db.transaction() as tx:
        await schedules.plan(
            tx, function_id, ScheduleUse(cron="*/5 * * * *", timezone="Asia/Kolkata", payload={"a": 1})
        )
    assert await Schedules(stage.db).fire() == 0
    missed = datetime.now(UTC) - timedelta(hours=2)
    await stage.value("update serverless.schedules set next_at = $1", missed)
    assert [await Schedules(stage.db).fire() for _ in range(2)] == [1, 0]
    (made,) = await rows(stage, "select id, payload, waiting, attributes from serverless.invocations")
    assert made["id"] == f"cron-{function_id}-{int(missed.timestamp())}"
    assert (made["payload"], made["waiting"], made["attributes"]["schedule"]) == (b'{"a":1}', True, "*/5 * * * *")
    next_at = await stage.value("select next_at from serverless.schedules")
    assert datetime.now(UTC) < next_at <= datetime.now(UTC) + timedelta(minutes=5)


async def test_two_sweeps_at_once_make_one_invocation(stage: Stage) -> None:
    function_id = await stage.define("twice")
    async with stage.db.transaction() as tx:
        await schedules.plan(tx, function_id, ScheduleUse(cron="0 0 1 1 *"))
    await stage.value("update serverless.schedules set next_at = now() - interval '1 s'")
    async with stage.db.transaction() as tx:
        await tx.execute("select 1 from serverless.schedules for update")
        assert await Schedules(stage.db).fire() == 0
    assert await Schedules(stage.db).fire() == 1


async def test_the_same_schedule_again_keeps_its_next_time(stage: Stage) -> None:
    function_id = await stage.define("kept")
    due = datetime.now(UTC) - timedelta(minutes=1)
    for cron, expected in (("0 0 1 1 *", False), ("0 0 1 1 *", True), ("0 0 2 1 *", False)):
        async with stage.db.transaction() as tx:
            await schedules.plan(tx, function_id, ScheduleUse(cron=cron))
        assert (await stage.value("select next_at from serverless.schedules") == due) is expected
        await stage.value("update serverless.schedules set next_at = $1", due)
    async with stage.db.transaction() as tx:
        await schedules.plan(tx, function_id, None)
    assert await stage.value("select count(*) from serverless.schedules") == 0


_ENDED = """
    insert into serverless.invocations (project_id, id, function_id, function_name, mode, state, waiting, content_type,
        headers, attributes, payload_hash, created_by, correlation_id, finished_at, payload_ref, result_ref)
    values ('prj_default', $1, $2, 'f', 'async', 'succeeded', false, '', '{}', '{}', '', '', '',
        clock_timestamp() - make_interval(secs => $3), $4, $5)
"""


async def test_what_was_kept_long_enough_goes_with_its_objects(stage: Stage) -> None:
    function_id = await stage.define("f")
    shelf = Shelf()
    for name, age_s in (("old", 2000.0), ("new", 600.0)):
        keys = (f"invocations/{name}/payload", "dataset" if name == "new" else "invocations/other/result-1")
        references = [{"key": key, "bytes": 1, "sha256": "0" * 64} for key in keys]
        for reference in references:
            shelf.kept["prj_default", str(reference["key"])] = b"x"
        async with stage.db.transaction() as tx:
            await tx.execute(_ENDED, name, function_id, age_s, *references)
            await tx.execute(
                "insert into serverless.outputs (project_id, invocation_id, attempt, seq, kind, text, function_id, at)"
                " select 'prj_default', $1, 1, n, 'stdout', 't', $2, now() - make_interval(secs => $3 * n)"
                " from generate_series(0, 1) n",
                name,
                function_id,
                age_s,
            )
            await tx.execute(
                "insert into serverless.callbacks (project_id, invocation_id, url, delivered_at, created_at)"
                " values ('prj_default', $1, '', now(), now() - make_interval(secs => $2))",
                name,
                age_s,
            )
            await tx.execute(
                "insert into serverless.dead_letters (id, project_id, function_name, source, failure_class, error,"
                " subject, payload, created_at) values ($1, 'prj_default', 'f', 'result', '', '', '', '',"
                " now() - make_interval(secs => $2))",
                f"dlt_{name}",
                age_s,
            )
    await Upkeep(stage.db, shelf, LIMITS).sweep()
    assert [row["id"] for row in await rows(stage, "select id from serverless.invocations")] == ["new"]
    assert {key for _, key in shelf.kept} == {"invocations/new/payload", "dataset", "invocations/other/result-1"}
    assert [tuple(row) for row in await rows(stage, "select invocation_id, seq from serverless.outputs")] == [
        ("new", 0)
    ]
    assert await stage.value("select string_agg(invocation_id, '') from serverless.callbacks") == "new"
    assert await stage.value("select string_agg(id, '') from serverless.dead_letters") == "dlt_new"


async def test_old_versions_and_gone_workers_go_but_none_that_is_used(stage: Stage) -> None:
    function_id = await stage.define("many")
    async with stage.db.transaction() as tx:
        for number in range(2, 106):
            await stage.add_version(tx, function_id, number, FunctionPut(sku="sim"))
        await tx.execute("update serverless.functions set current_version = 105, serving_version = 2")
        for name, version, state, gone_s in (("a", 3, "ready", None), ("b", 4, "gone", 900.0), ("c", 4, "gone", 1.0)):
            await tx.execute(
                "insert into serverless.workers (id, function_id, project_id, request, version, allocation_id, state,"
                " slots, token_hash, mac_key, lease_until, gone_at) values ($1, $2, 'prj_default', 'many', $3, $1, $4,"
                " 1, '', '', now(), now() - make_interval(secs => $5))",
                name,
                function_id,
                version,
                state,
                gone_s,
            )
    await Upkeep(stage.db, Shelf(), LIMITS).sweep()
    kept = {row["number"] for row in await rows(stage, "select number from serverless.versions")}
    assert kept == {2, 3, *range(6, 106)}
    assert {row["id"] for row in await rows(stage, "select id from serverless.workers")} == {"a", "c"}


async def test_results_of_attempts_that_came_to_nothing_go_too(stage: Stage) -> None:
    await stage.define()
    kept = [("a", 1), ("a", 2), ("b", 1), ("c", 1)]
    stage.shelf.kept = {("prj_default", f"invocations/{name}/result-{n}"): b"" for name, n in kept}
    for name, state, attempt in (("a", "succeeded", 2), ("b", "cancelled", 1), ("c", "succeeded", 1)):
        await stage.spawn(invocationID=name)
        await stage.value(
            "update serverless.invocations set waiting = false, state = $2, attempt = $3, result_ref = $4,"
            " finished_at = now() - interval '1 hour' where id = $1",
            name,
            state,
            attempt,
            {"key": f"invocations/{name}/result-{attempt}"} if state == "succeeded" else None,
        )
    await Upkeep(stage.db, stage.shelf, LIMITS).sweep()
    assert stage.shelf.kept == {}


async def test_a_deleted_function_goes_when_nothing_names_it(stage: Stage) -> None:
    for name in ("gone", "named"):
        await stage.define(name)
    await stage.spawn("named")
    await stage.value("update serverless.functions set deleted = true, updated_at = now() - interval '1 hour'")
    await Upkeep(stage.db, stage.shelf, LIMITS).sweep()
    assert [row["name"] for row in await rows(stage, "select name from serverless.functions")] == ["named"]


async def test_time_used_is_told_once_when_its_minute_is_over(stage: Stage) -> None:
    function_id = await stage.define("f", labels={"team": "a"})
    async with stage.db.transaction() as tx:
        for ago, key_id in (("5 minutes", "key_1"), ("5 minutes", ""), ("0 minutes", "key_1")):
            await tx.execute(
                "insert into serverless.spent values ($1, 'prj_default', 'org_default', $2,"
                " date_trunc('minute', now()) - $3::text::interval, 3, 4500)",
                function_id,
                key_id,
                ago,
            )
    assert [await Metering(stage.db).meter() for _ in range(2)] == [2, 0]
    assert await stage.value("select count(*) from serverless.spent") == 1
    facts = [
        msgspec.convert(row["payload"], UsageFact)
        for row in await rows(stage, "select payload from kit.outbox where type = 'billing.usage_recorded'")
    ]
    assert len({fact.key for fact in facts}) == 4
    used = sorted((fact.meter, fact.quantity, fact.key_id or "") for fact in facts)
    assert used == [
        ("function.invocation_ms", 4500, ""),
        ("function.invocation_ms", 4500, "key_1"),
        ("function.invocations", 3, ""),
        ("function.invocations", 3, "key_1"),
    ]
    assert {(fact.resource_kind, fact.resource_id) for fact in facts} == {("function", function_id)}
    assert facts[0].labels == {"function": "f", "team": "a"}


async def test_billing_takes_the_time_in_when_it_has_a_price(stage: Stage) -> None:
    function_id = await stage.define("f")
    async with stage.db.transaction() as tx:
        await tx.execute(
            "insert into billing.prices (meter, version, price_microusd, per, effective_at, created_by) values"
            " ('function.invocation_ms', 2, 10, 1000, now() - interval '1 hour', 'usr_default')"
        )
        await tx.execute(
            "insert into serverless.spent values ($1, 'prj_default', 'org_default', '',"
            " date_trunc('minute', now()) - interval '5 minutes', 1, 4500)",
            function_id,
        )
    ledger = Ledger(stage.db)
    await ledger.begin(datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=6))
    await Metering(stage.db).meter()
    await BillingMetering(stage.db).sweep()
    (taken,) = await rows(
        stage,
        "select s.resource_kind, s.resource_id, r.quantity, r.state from billing.recorded r"
        " join billing.series s on s.id = r.series_id where r.meter = 'function.invocation_ms'",
    )
    assert tuple(taken) == ("function", function_id, 4500, "pending")
    assert await stage.value("select count(*) from billing.recorded where state = 'refused'") == 0
    await ledger.catch_up(datetime.now(UTC) + timedelta(minutes=3))
    report = await costs_of(ledger, lately(), "function", caller=someone(Role.OWNER, org="org_default"))
    assert [(line.group, line.amount_microusd) for line in report.items] == [(function_id, 45)]

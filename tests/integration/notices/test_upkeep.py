"""What ends, what goes, what is told to the owner, and how secrets move to a new master key."""

import json
from dataclasses import replace
from pathlib import Path

from penstock.notices import service
from penstock.notices.model import DeliveryState, WebhookState
from penstock.notices.store import spread
from penstock.notices.upkeep import rewrap
from penstock.secrets import keyring
from webhook_receiver import EAGER, PROJECT, Stage, caller


async def paused_facts(stage: Stage, webhook_id: str) -> int:
    """How often the owner's feed says that it was paused."""
    return await stage.sql(
        "select count(*) from kit.outbox where type = 'notices.webhook_paused' and aggregate_id = $1"
        " and project_id = $2",
        webhook_id,
        PROJECT,
    )


async def test_a_webhook_that_fails_too_often_is_paused_and_its_owner_told_once(stage: Stage) -> None:
    stage.receiver.answer("/", 503)
    made, _ = await stage.webhook("/", ("provisioning.*",))
    stage.patience = replace(EAGER, failures_max=4)
    await stage.say(1, 2)
    await stage.spread()
    assert await stage.drain() >= 4
    seen = await stage.show(made.id)
    assert seen.state is WebhookState.PAUSED
    assert seen.reason == "failed 4 times in a row, the last time with status"
    assert await paused_facts(stage, made.id) == 1
    assert await stage.sql("select count(*) from kit.audit where action = 'webhooks.pause'") == 1
    assert {each.state for each in await stage.deliveries(made.id)} == {DeliveryState.PENDING}
    stage.receiver.answer("/", 200)
    resumed = await stage.update(made.id, enabled=True)
    assert (resumed.failures, resumed.failing_since, resumed.reason) == (0, None, "")
    assert await stage.drain() == 2


async def test_what_waited_too_long_fails_and_is_deleted_a_week_later(stage: Stage) -> None:
    made, _ = await stage.webhook("/", ("provisioning.*",))
    await stage.say(1)
    await stage.spread()
    await stage.update(made.id, enabled=False)
    await stage.upkeep.sweep()
    assert [each.state for each in await stage.deliveries(made.id)] == [DeliveryState.PENDING]
    await stage.sql("update notices.deliveries set give_up_at = clock_timestamp()")
    await stage.upkeep.sweep()
    [ended] = await stage.deliveries(made.id)
    assert (ended.state, ended.error, ended.next_try_at) == (DeliveryState.FAILED, "expired", None)
    await stage.sql("update notices.deliveries set finished_at = clock_timestamp() - interval '7 days 1 second'")
    await stage.upkeep.sweep()
    assert await stage.deliveries(made.id) == []


async def test_a_delivery_can_be_sent_again(stage: Stage) -> None:
    made, _ = await stage.webhook("/", ("provisioning.*",))
    await stage.say(1)
    await stage.spread()
    await stage.drain()
    [sent] = await stage.deliveries(made.id)
    async with stage.db.transaction() as tx:
        again = await stage.webhooks.retry(tx, caller(), made.id, sent.id)
    assert again.state is DeliveryState.PENDING
    await stage.drain()
    assert stage.receiver.numbers("/") == [1, 1]
    assert stage.receiver.seen[0].event["event_id"] == stage.receiver.seen[1].event["event_id"]


async def test_a_webhook_that_too_much_waits_for_is_paused(stage: Stage) -> None:
    made, _ = await stage.webhook("/", ("provisioning.*",))
    stage.patience = replace(EAGER, pending_max=3)
    await stage.say(1, 2, 3)
    await stage.spread()
    await stage.upkeep.sweep()
    assert (await stage.show(made.id)).state is WebhookState.ACTIVE
    await stage.say(4)
    await stage.spread()
    await stage.upkeep.sweep()
    assert (await stage.show(made.id)).reason == "more than 3 events wait for it"
    assert await paused_facts(stage, made.id) == 1


async def test_nothing_is_left_of_a_deleted_webhook(stage: Stage) -> None:
    made, _ = await stage.webhook("/", ("provisioning.*",))
    await stage.say(1)
    await stage.spread()
    async with stage.db.transaction() as tx:
        await service.delete(tx, caller(), made.id)
    assert await stage.drain() == 0
    await stage.upkeep.sweep()
    for table in ("webhooks", "deliveries", "secrets"):
        assert await stage.sql(f"select count(*) from notices.{table}") == 0, table
    assert await stage.sql("select count(*) from kit.outbox where type = 'notices.webhook_deleted'") == 1


async def test_secrets_move_to_a_new_master_key_and_sign_as_before(stage: Stage, tmp_path: Path) -> None:
    _, secret = await stage.webhook("/", ("provisioning.*",))
    old = stage.vault.current_key_id()
    new = keyring.rotate(tmp_path / "keys")
    assert stage.vault.current_key_id() == new != old
    done = await rewrap(stage.db, stage.vault, progress=lambda _: None)
    assert (done.secrets, done.left, done.used) == (1, 0, frozenset())
    (tmp_path / "keys" / f"{old}.key").unlink()
    await stage.say(1)
    await stage.spread()
    await stage.drain()
    assert stage.receiver.seen[-1].signed_by(secret)


async def test_a_first_webhook_after_a_long_silence_does_not_make_the_log_be_read_again(stage: Stage) -> None:
    await stage.sql(
        "insert into kit.outbox (event_id, type, aggregate_id, version, organisation_id, project_id, correlation_id,"
        " payload) select 'evt_old' || n, 'provisioning.active', 'alc_old' || n, 1, 'org_default', $1, 'cor', '{}'"
        " from generate_series(1, 20000) n",
        PROJECT,
    )
    await stage.sql("analyze kit.outbox")
    await stage.webhook()
    async with stage.db.read() as conn:
        start = await spread.start(conn)
        assert start is not None
        for statement, more in ((spread.NEWS, ()), (spread.BATCH, (1000,))):
            told = await conn.fetchval(f"explain (analyze, buffers, format json) {statement}", *start, *more)
            [plan] = json.loads(told) if isinstance(told, str) else told
            read = plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]
            assert read <= 20, plan

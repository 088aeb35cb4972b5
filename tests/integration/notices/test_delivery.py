"""Events on their way to webhooks: all of them, in order, to nobody else, whatever dies or hangs."""

import asyncio
from dataclasses import replace

import pytest
from aiohttp import web

from penstock.kit.caller import Caller
from penstock.kit.errors import Denied
from penstock.notices.fanout import Fanout
from penstock.notices.model import Crowd, DeliveryState, Patience, WebhookState
from penstock.notices.sender import Sender
from penstock.notices.store import deliveries
from webhook_receiver import EAGER, SISTER, Stage, caller


async def test_an_event_arrives_signed_and_whole(stage: Stage) -> None:
    made, secret = await stage.webhook()
    await stage.say(1)
    assert await stage.spread() >= 1
    await stage.drain()
    [message] = [each for each in stage.receiver.seen if each.event["event_type"] == "provisioning.active"]
    assert message.signed_by(secret)
    assert not message.signed_by("whs_another")
    assert message.headers["penstock-event-id"] == message.event["event_id"]
    assert message.headers["host"] == f"hooks.example:{stage.receiver.port}"
    assert set(message.event) >= {"aggregate_id", "version", "project_id", "correlation_id", "occurred_at"}
    [sent] = await stage.deliveries(made.id)
    assert (sent.state, sent.attempts, sent.status, sent.error) == (DeliveryState.DELIVERED, 1, 200, "")


async def test_only_what_was_asked_for_comes_and_nothing_from_before(stage: Stage) -> None:
    await stage.say(0)
    await stage.webhook("/all")
    await stage.webhook("/some", ("provisioning.active", "identity.*"))
    await stage.say(1, event_type="provisioning.active")
    await stage.say(2, event_type="provisioning.activex")
    await stage.say(3, event_type="identity.key_created")
    await stage.say(4, event_type="identityx.key_created")
    await stage.spread()
    stage.crowd = Crowd(per_webhook=1)
    await stage.drain()
    assert stage.receiver.numbers("/some") == [1, 3]
    assert [message.event["payload"].get("n") for message in stage.receiver.seen if message.path == "/all"][-4:] == [
        1,
        2,
        3,
        4,
    ]


async def test_anothers_events_never_arrive(stage: Stage) -> None:
    await stage.webhook("/mine", ("provisioning.*",))
    await stage.webhook("/theirs", ("provisioning.*",), caller(SISTER))
    await stage.say(1)
    await stage.say(2, project_id=SISTER)
    await stage.say(3, project_id=None, organisation_id=None)
    await stage.say(4, project_id=None)
    await stage.spread()
    await stage.drain()
    assert stage.receiver.numbers("/mine") == [1]
    assert stage.receiver.numbers("/theirs") == [2]


async def test_bills_of_the_organisation_come_to_whoever_named_them_and_may_see_them(stage: Stage) -> None:
    payer = caller(billing=True)
    await stage.webhook("/bills", ("billing.*",), payer)
    await stage.webhook("/one", ("billing.balance_depleted", "*"), payer)
    await stage.webhook("/all", ("*",), payer)
    await stage.webhook("/blind", ("billing.*",))
    await stage.webhook("/elsewhere", ("billing.*",), caller(SISTER, organisation_id="org_other", billing=True))
    await stage.say(1, event_type="billing.low_balance_warning", project_id=None)
    await stage.say(2, event_type="billing.balance_depleted", project_id=None)
    await stage.say(3, event_type="billing.balance_depleted", project_id=None, organisation_id=None)
    await stage.spread()
    stage.crowd = Crowd(per_webhook=1)
    await stage.drain()
    got = {path: stage.receiver.numbers(path) for path in ("/bills", "/blind", "/elsewhere")}
    assert got == {"/bills": [1, 2], "/blind": [], "/elsewhere": []}
    numbers = {
        path: [m.event["payload"].get("n") for m in stage.receiver.seen if m.path == path] for path in ("/one", "/all")
    }
    assert [n for n in numbers["/one"] if n] == [2]
    assert [n for n in numbers["/all"] if n] == []
    with pytest.raises(Denied):
        await stage.webhooks.check(caller(), None, ["payments.*"])


async def test_events_of_one_aggregate_keep_their_order_through_failures(stage: Stage) -> None:
    made, _ = await stage.webhook("/", ("provisioning.*",))
    answers = iter([500, 200, 500, 500])

    async def flaky(_: web.Request) -> web.Response:
        return web.Response(status=next(answers, 200))

    stage.receiver.on("/", flaky)
    for number in range(6):
        await stage.say(number, aggregate_id="alc_a" if number % 2 else "alc_b")
    await stage.spread()
    await stage.drain()
    taken = {n: [i for i, each in enumerate(stage.receiver.numbers("/")) if each == n] for n in range(6)}
    for earlier, later in ((0, 2), (2, 4), (1, 3), (3, 5)):
        assert max(taken[earlier]) < min(taken[later]), stage.receiver.numbers("/")
    assert {each.state for each in await stage.deliveries(made.id)} == {DeliveryState.DELIVERED}


async def test_without_failures_the_order_is_that_of_the_feed(stage: Stage) -> None:
    await stage.webhook("/", ("provisioning.*",))
    for number in range(12):
        await stage.say(number)
    await stage.spread()
    stage.crowd = Crowd(per_webhook=1)
    await stage.drain()
    assert stage.receiver.numbers("/") == list(range(12))


async def test_a_delivery_that_was_sent_but_not_settled_is_sent_again(stage: Stage) -> None:
    """The worker dies between the answer and its own transaction."""
    made, _ = await stage.webhook("/", ("provisioning.*",))
    await stage.say(1)
    await stage.spread()
    dying = stage.sender()

    async def die(*_: object, **__: object) -> bool:
        raise asyncio.CancelledError

    original, deliveries.delivered = deliveries.delivered, die
    try:
        with pytest.raises(asyncio.CancelledError):
            await stage.send(dying)
    finally:
        deliveries.delivered = original
    assert stage.receiver.numbers("/") == [1]
    assert await stage.send() == 0, "its lease has not ended"
    await stage.sql("update notices.deliveries set lease_until = clock_timestamp()")
    assert await stage.send() == 1
    assert stage.receiver.numbers("/") == [1, 1]
    [settled] = await stage.deliveries(made.id)
    assert (settled.state, settled.attempts) == (DeliveryState.DELIVERED, 2)


async def test_nothing_is_lost_when_senders_are_killed_again_and_again(stage: Stage) -> None:
    made, _ = await stage.webhook("/", ("provisioning.*",))
    stage.patience = replace(EAGER, lease_s=0.05)
    killed = 0
    for number in range(20):
        await stage.say(number)
        await stage.spread()
        sender = stage.sender()
        killed += await sender.start()
        if number % 3:
            await asyncio.sleep(0.001 * number)
            await sender.close()
        else:
            await sender.settle()
    assert killed > 10
    async with asyncio.timeout(20):
        while {each.state for each in await stage.deliveries(made.id)} != {DeliveryState.DELIVERED}:
            await stage.send()
            await asyncio.sleep(0.02)
    assert set(stage.receiver.numbers("/")) == set(range(20))


async def test_two_senders_share_the_work_and_send_nothing_twice(stage: Stage) -> None:
    await stage.webhook("/", ("provisioning.*",))
    await stage.say(*range(40))
    await stage.spread()
    one, other = stage.sender(), stage.sender()
    async with asyncio.timeout(20):
        while sum(await asyncio.gather(one.start(), other.start())):
            await asyncio.gather(one.settle(), other.settle())
    assert sorted(stage.receiver.numbers("/")) == list(range(40))


async def test_a_late_settlement_of_a_lost_claim_changes_nothing(stage: Stage) -> None:
    made, _ = await stage.webhook("/", ("provisioning.*",))
    await stage.say(1)
    await stage.spread()
    async with stage.db.transaction() as tx:
        [late] = await deliveries.claim(tx, Crowd(), room=1, lease_s=0.0)
    async with stage.db.transaction() as tx:
        [now] = await deliveries.claim(tx, Crowd(), room=1, lease_s=30.0)
    assert (late.id, late.attempts, now.attempts) == (now.id, 1, 2)
    async with stage.db.transaction() as tx:
        assert not await deliveries.delivered(tx, late, status=200)
        assert await deliveries.failed(tx, late, EAGER, error="timeout", detail="", status=None) is None
        assert await deliveries.delivered(tx, now, status=204)
    [settled] = await stage.deliveries(made.id)
    assert (settled.state, settled.status, settled.error) == (DeliveryState.DELIVERED, 204, "")


async def test_a_receiver_that_hangs_delays_no_other(stage: Stage) -> None:
    hung, free = asyncio.Event(), asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        hung.set()
        await free.wait()
        return web.Response()

    stage.receiver.on("/hangs", hang)
    await stage.webhook("/hangs", ("provisioning.*",))
    await stage.webhook("/works", ("provisioning.*",), caller(SISTER))
    await stage.say(*range(50))
    await stage.say(*range(50), project_id=SISTER)
    await stage.spread()
    sender = stage.sender()
    keeping = asyncio.create_task(_keep(sender))
    try:
        async with asyncio.timeout(20):
            await hung.wait()
            while len(stage.receiver.numbers("/works")) < 50:
                await asyncio.sleep(0.01)
        assert len(stage.receiver.numbers("/hangs")) <= Crowd().per_webhook
    finally:
        free.set()
        keeping.cancel()
        await sender.close()


async def _keep(sender: Sender) -> None:
    while True:
        await sender.keep()


async def test_a_failing_webhook_is_left_alone_longer_and_longer_and_only_it(stage: Stage) -> None:
    stage.receiver.answer("/bad", 500)
    bad, _ = await stage.webhook("/bad", ("provisioning.*",))
    await stage.webhook("/good", ("provisioning.*",))
    patience = Patience()
    await stage.say(1, 2, 3)
    await stage.spread()
    await stage.drain(stage.sender(patience))
    assert sorted(stage.receiver.numbers("/good")) == [1, 2, 3]
    seen = await stage.show(bad.id)
    assert (seen.failures, seen.state) == (1, WebhookState.ACTIVE), "one outage counts once"
    assert seen.failing_since is not None
    waits: list[float] = []
    for _ in range(12):
        wait = "select extract(epoch from quiet_until - clock_timestamp())::float8 from notices.webhooks where id = $1"
        waits.append(await stage.sql(wait, bad.id))
        await stage.sql("update notices.webhooks set quiet_until = clock_timestamp() where id = $1", bad.id)
        await stage.sql("update notices.deliveries set next_at = clock_timestamp() where state = 'pending'")
        assert await stage.send(stage.sender(patience)) == 1, "one at a time while it fails"
    assert 3 < waits[0] < 6.1
    assert 2800 < waits[-1] < 4400
    assert waits[:6] == sorted(waits[:6])


async def test_one_bad_event_does_not_hold_up_those_of_others(stage: Stage) -> None:
    async def picky(request: web.Request) -> web.Response:
        return web.Response(status=500 if (await request.json())["payload"]["n"] == 1 else 200)

    stage.receiver.on("/", picky)
    made, _ = await stage.webhook("/", ("provisioning.*",))
    stage.patience = replace(EAGER, retry_first_s=60.0, retry_max_s=60.0)
    stage.crowd = Crowd(per_webhook=1)  # the bad one is settled before the others are sent
    await stage.say(1, 2, 3)
    await stage.spread()
    await stage.send()
    await stage.sql("update notices.webhooks set quiet_until = '-infinity'")
    await stage.drain()
    states = [(each.state, each.error) for each in reversed(await stage.deliveries(made.id))]
    assert states == [
        (DeliveryState.PENDING, "status"),
        (DeliveryState.DELIVERED, ""),
        (DeliveryState.DELIVERED, ""),
    ]
    assert (await stage.show(made.id)).failures == 0


async def test_both_secrets_sign_after_a_rotation_and_the_old_one_ends(stage: Stage) -> None:
    made, old = await stage.webhook("/", ("provisioning.*",))
    async with stage.db.transaction() as tx:
        changed, new = await stage.webhooks.rotate(tx, caller(), made.id)
    assert changed.old_secret_until is not None
    assert old != new
    await stage.say(1)
    await stage.spread()
    await stage.drain()
    assert [stage.receiver.seen[-1].signed_by(each) for each in (old, new)] == [True, True]
    await stage.sql("update notices.secrets set expires_at = clock_timestamp() where expires_at is not null")
    await stage.say(2)
    await stage.spread()
    await stage.drain()
    assert [stage.receiver.seen[-1].signed_by(each) for each in (old, new)] == [False, True]


async def test_secrets_are_nowhere_in_the_database(stage: Stage) -> None:
    made, secret = await stage.webhook()
    for table in ("notices.secrets", "notices.webhooks", "kit.outbox", "kit.audit"):
        found = await stage.sql(f"select count(*) from {table} t where strpos(t::text, $1) > 0", secret)
        assert found == 0, table
    sealed = await stage.sql("select sealed from notices.secrets where webhook_id = $1", made.id)
    assert secret.encode() not in sealed


async def test_a_paused_webhook_gets_what_waited_and_what_comes_after_it_is_resumed(stage: Stage) -> None:
    made, _ = await stage.webhook("/", ("provisioning.*",))
    await stage.say(1)
    await stage.spread()
    paused = await stage.update(made.id, enabled=False)
    assert (paused.state, paused.reason) == (WebhookState.PAUSED, "paused by its owner")
    await stage.say(2)
    await stage.spread()
    assert await stage.drain() == 0
    await stage.update(made.id, enabled=True)
    await stage.say(3)
    await stage.spread()
    await stage.drain()
    assert sorted(stage.receiver.numbers("/")) == [1, 3]


async def test_a_deleted_project_hears_of_nothing(stage: Stage) -> None:
    payer: Caller = caller(billing=True)
    made, _ = await stage.webhook("/", ("billing.*", "identity.*"), payer)
    await stage.say(1, event_type="identity.project_deleted")
    await stage.spread()
    await stage.say(2, event_type="billing.balance_depleted", project_id=None)
    await stage.spread()
    await stage.drain()
    assert (await stage.show(made.id)).reason == "its project was deleted"
    assert 2 not in stage.receiver.numbers("/")


async def test_nobody_listening_costs_one_look(stage: Stage) -> None:
    await stage.say(*range(10))
    assert await stage.spread() == 0
    assert await stage.sql("select (tx, seq)::text from notices.progress") == "(0,0)"
    await stage.webhook("/", ("provisioning.*",))
    await stage.say(11)
    assert await stage.spread() == 1
    await stage.drain()
    assert stage.receiver.numbers("/") == [11]


async def test_an_event_that_commits_late_is_not_missed(stage: Stage) -> None:
    await stage.webhook("/", ("provisioning.*",))
    await stage.say(-1)
    async with stage.db.transaction() as tx:
        await tx.fetchval("select pg_current_xact_id()")
        await stage.say(1)
        await asyncio.gather(*(Fanout(stage.db, stage.patience, lambda: None).spread() for _ in range(2)))
        await tx.execute(
            "insert into kit.outbox (event_id, type, aggregate_id, version, organisation_id, project_id,"
            " correlation_id, payload) values ('evt_late', 'provisioning.active', 'alc_late', 1, 'org_default', $1,"
            " 'cor', $2)",
            caller().project_id,
            {"n": 0},
        )
    await stage.spread()
    stage.crowd = Crowd(per_webhook=1)
    await stage.drain()
    assert stage.receiver.numbers("/") == [-1, 0, 1]

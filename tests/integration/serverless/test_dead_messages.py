"""Messages that end as dead letters: of another tenant, unread by everybody, or too much for whoever takes them."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError
from prometheus_client import REGISTRY
from tests.conftest import Servers
from tests.integration.serverless.stage import Stage, shared, until

from penstock.kit.clock import utc_now
from penstock.kit.pull import Pull
from penstock.serverless import streams
from penstock.serverless.service.consuming import together
from penstock.wire import subjects
from penstock.wire.serverless import DEAD_LETTER_BYTES_MAX


@pytest.fixture(scope="module")
async def stage(servers: Servers) -> AsyncIterator[Stage]:
    """The function `f` of the default project, and one of another with a worker."""
    async with shared(servers) as made:
        await made.define("f", workers_max=1)
        await made.define("theirs", project_id="prj_other", workers_max=1)
        await made.call("f", payload=0)
        await made.call("theirs", project_id="prj_other", payload=0)
        yield made


def _theirs(stage: Stage) -> dict[str, Any]:
    """What a message of the other tenant says."""
    worker = next(each for each in stage.workers.values() if each.project_id == "prj_other")
    return {
        "version": "v1",
        "invocationID": "inv-x",
        "serverlessRequestID": "theirs",
        "mode": "async",
        "state": "succeeded",
        "workerName": worker.name,
        "workerNamespace": "prj_other",
        "projectID": "prj_other",
        "attempt": 1,
        "token": "00" * 16,
    }


def _security(reason: str) -> float:
    return REGISTRY.get_sample_value("penstock_security_events_total", {"reason": reason}) or 0.0


MORE = {
    "result": {"statusCode": 200, "startedAt": utc_now(), "completedAt": utc_now()},
    "metric": {"eventType": "heartbeat", "reportedAt": utc_now()},
    "output": {"items": []},
    "invocation": {
        "contentType": "application/json",
        "resultSubject": "",
        "metricsSubject": "",
        "enqueuedAt": utc_now(),
        "timeoutSeconds": 1,
    },
    "call": {"call": "c1", "function": "f"},
}
SUBJECTS = {
    "result": (subjects.result("f"), "foreign_function"),
    "metric": (subjects.metrics("f"), "foreign_metric"),
    "output": (subjects.output("f"), "foreign_output"),
    "invocation": (subjects.invoke("f"), "foreign_announcement"),
    "call": (subjects.call("f", "unit-f-worker-00000000"), "foreign_call"),
}


@pytest.mark.parametrize("source", SUBJECTS)
async def test_another_tenants_message_leaves_a_dead_letter_and_a_security_event(stage: Stage, source: str) -> None:
    subject, reason = SUBJECTS[source]
    letters = await stage.bus.client.subscribe(subjects.dead_letter(source, "f"))
    await stage.bus.client.flush()
    before = _security(reason)
    body = msgspec.json.encode(_theirs(stage) | MORE[source])
    await stage.bus.client.publish(subject, body, headers={"Nats-Msg-Id": secrets.token_hex(8)})
    letter = msgspec.json.decode((await letters.next_msg(timeout=30)).data)
    await letters.unsubscribe()
    assert (letter["source"], letter["failureClass"]) == (source, "foreign_message")
    assert letter["originalSubject"] == subject
    assert _security(reason) == before + 1


async def test_a_report_under_another_workers_name_leaves_both_too(stage: Stage) -> None:
    """On its own subject, with its own function, and a name whose key it does not have."""
    mine = next(each for each in stage.workers.values() if each.function == "f")
    letters = await stage.bus.client.subscribe(subjects.dead_letter("metric", "f"))
    await stage.bus.client.flush()
    before = _security("metric_proof")
    forged = _theirs(stage) | MORE["metric"] | {"projectID": "prj_default", "serverlessRequestID": "f"}
    body = msgspec.json.encode(forged | {"workerName": mine.name, "proof": "00"})
    await stage.bus.client.publish(subjects.metrics("f"), body, headers={"Nats-Msg-Id": secrets.token_hex(8)})
    letter = msgspec.json.decode((await letters.next_msg(timeout=30)).data)
    await letters.unsubscribe()
    assert (letter["failureClass"], letter["error"]) == ("foreign_message", "metric_proof")
    assert _security("metric_proof") == before + 1


SILENT = "unit-silent-worker-00000000"
UNREAD = {
    # A worker that takes an attempt again and again and never says so.
    streams.WORK: (subjects.dispatch("silent", SILENT), subjects.dead_letter("dispatch", "silent")),
    # Activators have all other subjects.
    streams.OUT: (subjects.probe(streams.OUT), subjects.dead_letter("invocation", streams.OUT)),
}


@pytest.mark.parametrize("stream", UNREAD)
async def test_what_nobody_acknowledges_leaves_a_dead_letter_and_its_stream(stage: Stage, stream: str) -> None:
    subject, letter_subject = UNREAD[stream]
    config = streams._consumer(SILENT, subject, in_flight_max=8)  # pyright: ignore[reportPrivateUsage]
    config.ack_wait = 0.2
    await stage.bus.js.add_consumer(stream, config)
    letters = await stage.bus.client.subscribe(letter_subject)
    await stage.bus.client.flush()
    place = await stage.bus.js.publish(subject, b"unread", headers={"Nats-Msg-Id": secrets.token_hex(8)})
    async with Pull(stage.bus, stream=stream, consumer=SILENT, batch=32):
        letter: dict[str, Any] = {}
        while letter.get("payload") != "unread":
            letter = msgspec.json.decode((await letters.next_msg(timeout=30)).data)
    await letters.unsubscribe()
    await until(lambda: _is_gone(stage, stream, place.seq))
    await stage.bus.js.delete_consumer(stream, SILENT)
    assert (letter["failureClass"], letter["consumer"], letter["deliveryCount"]) == ("retry_exhausted", SILENT, 5)


async def _is_gone(stage: Stage, stream: str, seq: int) -> bool:
    try:
        await stage.bus.js.get_msg(stream, seq)
    except NotFoundError:
        return True
    return False


async def test_a_dead_letter_fits_its_stream_whatever_its_message_says(stage: Stage) -> None:
    """A result of nobody, with names of a MiB and line breaks, and a report of control characters."""
    info = await stage.bus.js.stream_info(streams.DEAD)
    huge = _theirs(stage) | MORE["result"] | {"invocationID": "x\r\nNats-TTL: 1s\r\n" * 50_000}
    theirs = subjects.request_token("prj_other", "theirs")
    bodies = {subjects.result(theirs): msgspec.json.encode(huge), subjects.metrics(theirs): b"\x01" * (1 << 20)}
    for subject, body in bodies.items():
        await stage.bus.client.publish(subject, body, headers={"Nats-Msg-Id": secrets.token_hex(8)})

    async def kept() -> bool:
        return (await stage.bus.js.stream_info(streams.DEAD)).state.last_seq >= info.state.last_seq + 2

    await until(kept)
    for source in ("result", "metric"):
        letter = await stage.bus.js.get_last_msg(streams.DEAD, subjects.dead_letter(source, theirs))
        assert len(letter.data or b"") < DEAD_LETTER_BYTES_MAX // 2
        assert "Nats-TTL" not in (letter.headers or {})


async def test_a_message_that_cannot_be_handled_is_buried_and_holds_up_no_other(stage: Stage) -> None:
    """As when a statement fails for what is in one of them: the others of its batch are taken at once."""
    taken: list[bytes] = []
    tries: list[bytes] = []

    async def take(messages: Sequence[Msg]) -> None:
        tries.extend(message.data for message in messages)
        if any(message.data == b"poison" for message in messages):
            raise ValueError("no")
        taken.extend(message.data for message in messages)
        for message in messages:
            await message.ack()

    subject = subjects.dispatch("many", "unit-many-worker-00000000")
    config = streams._consumer("many", subject, in_flight_max=64)  # pyright: ignore[reportPrivateUsage]
    await stage.bus.js.add_consumer(streams.WORK, config)
    letters = await stage.bus.client.subscribe(subjects.dead_letter("dispatch", "many"))
    await stage.bus.client.flush()
    for body in (b"one", b"poison", b"two"):
        await stage.bus.js.publish(subject, body, headers={"Nats-Msg-Id": secrets.token_hex(8)})
    async with Pull(stage.bus, stream=streams.WORK, consumer="many", batch=8) as pull:

        async def consume() -> None:
            while True:
                await together(stage.bus, await pull.take(8), take)

        consuming = asyncio.create_task(consume())
        await until(lambda: _is(sorted(taken) == [b"one", b"two"]), timeout_s=2)
        letter = msgspec.json.decode((await letters.next_msg(timeout=30)).data)
        consuming.cancel()
    await letters.unsubscribe()
    await streams.forget_worker(stage.bus, "many")
    assert (letter["failureClass"], letter["payload"]) == ("retry_exhausted", "poison")


async def _is(value: object) -> object:
    return value

"""A result is told until the stream has it, under one id, and no longer than anybody wants it."""

from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from penstock.kit.bus import Bus
from penstock.kit.publish import NotStored
from penstock.node.sidecar import answers
from penstock.node.sidecar.gateway import Attempts
from penstock.node.sidecar.results import Results, Told
from penstock.wire.serverless import (
    ERROR_BYTES_MAX,
    INLINE_BYTES_MAX,
    WORKER_MESSAGE_BYTES_MAX,
    FrameworkReply,
    InvocationResultMessage,
    Mode,
    Reference,
    State,
    WorkerDispatchMessage,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class ForgetfulBus:
    """Takes a message at the last of so many attempts."""

    def __init__(self, refusals: int) -> None:
        self.client = SimpleNamespace(max_payload=1 << 20)
        self.refusals = refusals
        self.sent: list[tuple[str, bytes]] = []

    async def publish(self, _: str, body: bytes, *, msg_id: str) -> None:
        self.sent.append((msg_id, body))
        if len(self.sent) <= self.refusals:
            raise NotStored("away")


def told(*, wanted: Any = lambda: True, token: str = "t") -> Told:
    dispatch = WorkerDispatchMessage(
        version="v1",
        invocationID="inv-1",
        serverlessRequestID="f",
        mode=Mode.ASYNC,
        state=State.DISPATCHING,
        contentType="application/json",
        resultSubject="r",
        metricsSubject="m",
        workerName="w",
        workerNamespace="p",
        dispatchedAt=NOW,
        timeoutSeconds=1,
        projectID="p",
        attempt=2,
        token=token,
    )
    outcome = answers.judged(FrameworkReply(body=msgspec.Raw(b"[1]")))
    return Told(dispatch=dispatch, outcome=outcome, started_at=NOW, duration_s=1.5, wanted=wanted)


class Shelf:
    """Keeps bodies (the gateway)."""

    async def store(self, _: object, content: Any, __: str) -> Reference:
        size, pieces = content()
        assert len(b"".join(pieces)) == size
        return Reference(key="kept", bytes=size, sha256="0" * 64)


def results(bus: ForgetfulBus, *, bytes_max: int = 100) -> Results:
    gateway = cast(Attempts, Shelf())
    return Results(lambda: cast(Bus, bus), gateway, "subject", inline_bytes_max=bytes_max, result_bytes_max=bytes_max)


@pytest.mark.parametrize("quotes", [0, 4000])
@pytest.mark.parametrize("errors", ["", "\x01" * ERROR_BYTES_MAX])
async def test_the_stream_takes_every_result(errors: str, quotes: int) -> None:
    """With a body as large as may be in line; one that does not fit with its errors is kept elsewhere."""
    bus = ForgetfulBus(refusals=0)
    bus.client.max_payload = 8 << 20
    headers = {f"x-{n}": '"' * quotes for n in range(64)}
    body = b'"' + b"x" * (INLINE_BYTES_MAX - 2) + b'"'
    reply = FrameworkReply(body=msgspec.Raw(body), error=errors, traceback=errors, headers=headers)
    await results(bus, bytes_max=INLINE_BYTES_MAX).tell(replace(told(), outcome=answers.judged(reply)))
    ((_, sent),) = bus.sent
    assert len(sent) < WORKER_MESSAGE_BYTES_MAX - 1024
    message = msgspec.json.decode(sent, type=InvocationResultMessage)
    assert (message.bodyRef is not None) == bool(quotes and errors)
    assert bytes(message.body) == (b"null" if message.bodyRef else body)


async def test_it_is_sent_again_under_the_same_id_until_the_stream_has_it() -> None:
    bus = ForgetfulBus(refusals=3)
    assert await results(bus).tell(told()) is not None
    assert len(bus.sent) == 4
    assert len(set(bus.sent)) == 1
    message = msgspec.json.decode(bus.sent[0][1], type=InvocationResultMessage)
    assert (message.attempt, message.durationMs, bytes(message.body)) == (2, 1500, b"[1]")


async def test_it_is_given_up_when_nobody_wants_it() -> None:
    bus = ForgetfulBus(refusals=1000)
    assert await results(bus).tell(told(wanted=lambda: len(bus.sent) < 2)) is None
    assert len(bus.sent) == 2


async def test_its_id_cannot_be_guessed_from_what_others_know() -> None:
    bus = ForgetfulBus(refusals=0)
    await results(bus).tell(told(token="a"))
    await results(bus).tell(told(token="b"))
    assert bus.sent[0][0] != bus.sent[1][0]

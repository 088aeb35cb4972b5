"""A result is told until the stream has it, under one id, and no longer than anybody wants it."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from penstock.kit.bus import Bus
from penstock.kit.publish import NotStored
from penstock.node.sidecar import answers
from penstock.node.sidecar.gateway import Attempts
from penstock.node.sidecar.results import Results, Told
from penstock.wire.serverless import FrameworkReply, InvocationResultMessage, Mode, State, WorkerDispatchMessage

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


def results(bus: ForgetfulBus) -> Results:
    gateway = cast(Attempts, None)
    return Results(lambda: cast(Bus, bus), gateway, "subject", inline_bytes_max=100, result_bytes_max=100)


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

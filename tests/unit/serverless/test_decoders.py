"""Bytes that nobody honest sends, given to each reader of messages: each says so in its own way, and none fails."""

from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.aio.msg import Msg

from penstock.billing.errors import BadWebhook
from penstock.billing.providers import events
from penstock.kit.errors import Invalid
from penstock.serverless import callout
from penstock.serverless.service import calls, ingress, reading, reports, results, sayings
from penstock.serverless.service.burying import Foreign, Unreadable, dead_letter
from penstock.wire import subjects
from penstock.wire.serverless import (
    CallMessage,
    FailureClass,
    InvocationMessage,
    InvocationResultMessage,
    WorkerMetricMessage,
)


def _message(subject: str, data: bytes) -> Msg:
    return Msg(_client=Client(), subject=subject, data=data, reply="")


READERS: dict[str, Callable[[bytes], object]] = {
    "result": reading.result,
    "result message": lambda data: results._read(_message(subjects.result("f"), data)),
    "metric": lambda data: reports._read(_message(subjects.metrics("f"), data)),
    "output": lambda data: sayings._read(_message(subjects.output("f"), data)),
    "call": calls._read,
    "announcement": lambda data: ingress._read(_message(subjects.invoke("f"), data)),
    "callout": callout.question,
    "payment": lambda data: events.decode(data, livemode=False),
}
EXPECTED = (Unreadable, Foreign, Invalid, BadWebhook)

_FIELDS = sorted(
    {
        field
        for shape in (CallMessage, InvocationMessage, InvocationResultMessage, WorkerMetricMessage)
        for field in shape.__struct_fields__
    }
    | {"items", "livemode", "data", "type", "id"}
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just("v1") | st.just("\0"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
_OBJECTS = st.dictionaries(st.sampled_from(_FIELDS), _VALUES, max_size=12).map(
    lambda fields: msgspec.json.encode({"version": "v1", **fields})
)
_HOSTILE = [
    b"",
    b"\xff",
    b'{"version":"v1","invocationID":"\xff\xfe"}',
    b'{"version":"v1","x":"\xff"}',
    b'{"\xff":1}',
    b"[" * 100_000,
    b'{"version":"v1","body":' + b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"version":"\\ud800"}',
    b"null",
    b"1e999999",
    b"9" * 100_000,
]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("data", _HOSTILE, ids=lambda data: repr(data[:30]))
def test_what_is_known_to_break_decoders_is_unreadable(reader: str, data: bytes) -> None:
    with pytest.raises(EXPECTED):
        READERS[reader](data)


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=200) | _OBJECTS, cut=st.integers(0, 400), noise=st.binary(max_size=3))
def test_any_bytes_are_read_or_refused(reader: str, data: bytes, cut: int, noise: bytes) -> None:
    damaged = data[:cut] + noise + data[cut:]
    with suppress(EXPECTED):
        READERS[reader](damaged)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=300))
def test_any_bytes_have_a_dead_letter(data: bytes) -> None:
    letter = dead_letter(subjects.result("f"), data, failure=FailureClass.MALFORMED_MESSAGE, error=repr(data))
    assert msgspec.json.decode(msgspec.json.encode(letter))["source"] == "result"


def test_a_body_that_is_no_text_fails_its_attempt() -> None:
    data = (
        b'{"version":"v1","invocationID":"i","serverlessRequestID":"f","mode":"async","state":"succeeded",'
        b'"workerName":"w","workerNamespace":"p","statusCode":200,"startedAt":"2026-01-01T00:00:00Z",'
        b'"completedAt":"2026-01-01T00:00:00Z","projectID":"p","attempt":1,"token":"00","body":"\xff"}'
    )
    assert reading.result(data).failureClass == "framework_error"

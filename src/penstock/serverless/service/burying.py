"""Dead letters of messages: what cannot be read, is not its sender's to send, or could not be handled in time.

A dead letter is published for those who watch the queue; its message is terminated, so that it is never delivered
again and holds up no other.
"""

import hashlib
from typing import Final

import msgspec
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError
from prometheus_client import Counter

from penstock.kit.bus import Bus
from penstock.kit.clock import utc_now
from penstock.kit.telemetry import logger
from penstock.serverless import streams
from penstock.serverless.streams import Exhausted
from penstock.wire import subjects
from penstock.wire.serverless import (
    DEAD_LETTER_ERROR_CHARS_MAX,
    DEAD_LETTER_NAME_CHARS_MAX,
    DEAD_LETTER_PAYLOAD_BYTES_MAX,
    VERSION,
    DeadLetterMessage,
    FailureClass,
    State,
)

_log = logger(__name__)
_AGAIN_S: Final = 2.0
#: The source of a dead letter, by the kind of subject that its message came on.
_SOURCES: Final = {
    "invoke": "invocation",
    "dispatch": "dispatch",
    "result": "result",
    "metrics": "metric",
    "output": "output",
    "call": "call",
}
discarded = Counter(
    "penstock_messages_discarded", "Messages that changed nothing, by source and reason", ["source", "reason"]
)
security = Counter("penstock_security_events", "Messages that nobody honest sends, by reason", ["reason"])


class Unreadable(Exception):
    """The bytes are no such message. `failure` says of what kind."""

    def __init__(self, failure: FailureClass, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure
        self.detail = detail


class Foreign(Exception):
    """The message speaks for another function or worker than its subject does. `reason` labels the metric."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def of_subject(subject: str) -> tuple[str, str]:
    """The source and the function's token in a subject of ours."""
    kind, _, rest = subject.removeprefix(f"{subjects.SERVERLESS}.").partition(".")
    return _SOURCES.get(kind, "invocation"), rest.partition(".")[0] or "unknown"


async def refuse(bus: Bus, message: Msg, error: Unreadable | Foreign) -> None:
    """Bury a message that a consumer brought, and see to it that it is not brought again."""
    source, _ = of_subject(message.subject)
    if isinstance(error, Foreign):
        security.labels(error.reason).inc()
        _log.warning("security_event", reason=error.reason, subject=message.subject)
        await bury(bus, message, failure=FailureClass.FOREIGN_MESSAGE, error=error.reason)
    else:
        discarded.labels(source, error.failure).inc()
        _log.info("message_unreadable", subject=message.subject, error=error.detail[:DEAD_LETTER_ERROR_CHARS_MAX])
        await bury(bus, message, failure=error.failure, error=error.detail)
    await message.term()


async def give_up(bus: Bus, message: Msg, error: Exception) -> None:
    """A message whose handling failed: again in a moment, and a dead letter when it was delivered often enough."""
    if (message.metadata.num_delivered or 1) < streams.DELIVERIES_MAX:
        await message.nak(delay=_AGAIN_S)
        return
    source, _ = of_subject(message.subject)
    discarded.labels(source, FailureClass.RETRY_EXHAUSTED).inc()
    await bury(bus, message, failure=FailureClass.RETRY_EXHAUSTED, error=repr(error))
    await message.term()


async def exhausted(bus: Bus, found: Exhausted) -> None:
    """A message that the server delivered as often as it may, and that nobody acknowledged. It leaves its stream when
    the dead letter is stored: in a work queue nobody else would take it."""
    try:
        kept = await bus.js.get_msg(found.stream, found.stream_seq)
    except NotFoundError:
        return
    source, _ = of_subject(kept.subject or "")
    discarded.labels(source, FailureClass.RETRY_EXHAUSTED).inc()
    _log.warning("deliveries_exhausted", stream=found.stream, consumer=found.consumer, subject=kept.subject)
    letter = dead_letter(
        kept.subject or "", kept.data or b"", failure=FailureClass.RETRY_EXHAUSTED, error="nobody acknowledged it"
    )
    letter = msgspec.structs.replace(
        letter,
        stream=found.stream,
        consumer=found.consumer,
        streamSequence=found.stream_seq,
        deliveryCount=found.deliveries,
    )
    await bus.publish(_subject(letter), _encoded(letter), msg_id=_message_id(letter))
    await bus.js.delete_msg(found.stream, found.stream_seq)


async def bury(bus: Bus, message: Msg, *, failure: FailureClass, error: str) -> None:
    """Publish the dead letter of a message that a consumer brought."""
    told = message.metadata
    letter = dead_letter(message.subject, message.data, failure=failure, error=error)
    letter = msgspec.structs.replace(
        letter,
        stream=told.stream,
        consumer=told.consumer,
        streamSequence=told.sequence.stream or 0,
        consumerSequence=told.sequence.consumer or 0,
        deliveryCount=told.num_delivered or 0,
    )
    await publish(bus, letter)


def dead_letter(subject: str, payload: bytes, *, failure: FailureClass, error: str) -> DeadLetterMessage:
    """The dead letter of a message on `subject`."""
    source, request = of_subject(subject)
    return DeadLetterMessage(
        version=VERSION,
        source=source,
        state=State.DEAD_LETTERED,
        failureClass=failure,
        originalSubject=subject,
        stream="",
        failedAt=utc_now(),
        serverlessRequestID=request,
        error=error,
        payload=payload[:DEAD_LETTER_PAYLOAD_BYTES_MAX].decode(errors="replace"),
    )


async def publish(bus: Bus, letter: DeadLetterMessage) -> None:
    """To those who watch, and to the stream that keeps dead letters for a while."""
    headers = {"Nats-Msg-Id": _message_id(letter)} if letter.streamSequence or letter.invocationID else None
    await bus.client.publish(_subject(letter), _encoded(letter), headers=headers)


def _subject(letter: DeadLetterMessage) -> str:
    return subjects.dead_letter(letter.source, of_subject(letter.originalSubject)[1])


def _message_id(letter: DeadLetterMessage) -> str:
    """A repeat is recognised by the place in a stream, or by the invocation's id: a tenant's word, and so not written
    into a header as it is."""
    named = letter.invocationID or f"{letter.stream}-{letter.streamSequence}"
    digest = hashlib.sha256(f"{letter.projectID}/{named}".encode(errors="replace")).hexdigest()
    return f"dlq-{letter.source}-{digest[:40]}"


def _encoded(letter: DeadLetterMessage) -> bytes:
    """In JSON, cut so that the stream takes it whatever its message said."""
    names = ("invocationID", "serverlessRequestID", "projectID", "workerName")
    cut = {name: str(getattr(letter, name))[:DEAD_LETTER_NAME_CHARS_MAX] for name in names}
    error = letter.error[:DEAD_LETTER_ERROR_CHARS_MAX]
    return msgspec.json.encode(msgspec.structs.replace(letter, error=error, **cut))

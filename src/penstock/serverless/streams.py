"""The streams of functions and their durable consumers.

WORK carries attempts to do, and refuses what it has no room for: whoever is refused keeps it in Postgres. OUT carries
what came of them until an activator has taken it, so many of each function: a sidecar that is refused tells it again,
and one function's flood stands before nobody else's messages for longer than that takes (ADR 37). CALLS carries what
handlers call, so many of each worker. DEAD keeps dead letters and drops the oldest. All may vanish at any time;
`ensure` makes them again. A worker's consumer is made by an activator, before the worker can connect, and by nobody
else.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import NotFoundError

from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.serverless.store import workers
from penstock.wire import subjects
from penstock.wire.serverless import DEAD_LETTER_BYTES_MAX, WORKER_MESSAGE_BYTES_MAX

WORK: Final = "WORK"
OUT: Final = "OUT"
DEAD: Final = "DEAD"
CALLS: Final = "CALLS"
ACTIVATOR: Final = "activator"
RESULTS: Final = "results"
METRICS: Final = "metrics"
OUTPUTS: Final = "outputs"
CALLERS: Final = "callers"

ACK_WAIT_S: Final = 30.0
DELIVERIES_MAX: Final = 5
_HOUR_S: Final = 3600
_GIB: Final = 1 << 30
#: A payload in line, in JSON and with all that goes with it.
_WORK_BYTES_MAX: Final = 4 << 20
#: Enough that a burst is not refused; what is, waits in Postgres.
_PER_SUBJECT_MAX: Final = 100_000
#: Of one function and kind in OUT. Activators take as many in a fraction of a second.
_UNTAKEN_MAX: Final = 500
#: One function has three kinds. With the largest messages of each it fills less than half.
_OUT_BYTES_MAX: Final = 8 * _GIB
_DEAD_LETTERS_MAX: Final = 1000
#: Of one worker. What is refused is asked again by its sidecar.
_CALLS_MAX: Final = 256
_CALLS_AGE_S: Final = 60
#: Beyond a worker's slots: the next attempt does not wait for the acknowledgement of the one whose slot it takes.
_SPARE_SLOTS: Final = 4
_IN_FLIGHT_MAX: Final = 20_000

STREAMS: Final = (
    StreamConfig(
        name=WORK,
        subjects=[subjects.INVOKES, subjects.DISPATCHES, subjects.probe(WORK)],
        retention=RetentionPolicy.WORK_QUEUE,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        max_msgs_per_subject=_PER_SUBJECT_MAX,
        discard_new_per_subject=True,
        max_bytes=4 * _GIB,
        max_msg_size=_WORK_BYTES_MAX,
        max_age=_HOUR_S,
        duplicate_window=120,
        deny_purge=True,
        allow_direct=False,
        allow_msg_ttl=True,
    ),
    StreamConfig(
        name=OUT,
        subjects=[subjects.RESULTS, subjects.METRICS, subjects.OUTPUTS, subjects.probe(OUT)],
        retention=RetentionPolicy.WORK_QUEUE,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        max_msgs_per_subject=_UNTAKEN_MAX,
        discard_new_per_subject=True,
        max_bytes=_OUT_BYTES_MAX,
        max_msg_size=WORKER_MESSAGE_BYTES_MAX,
        max_age=_HOUR_S,
        duplicate_window=120,
        deny_purge=True,
        allow_direct=False,
        allow_msg_ttl=True,
    ),
    StreamConfig(
        name=CALLS,
        subjects=[subjects.CALLS, subjects.probe(CALLS)],
        retention=RetentionPolicy.WORK_QUEUE,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        max_msgs_per_subject=_CALLS_MAX,
        discard_new_per_subject=True,
        max_bytes=2 * _GIB,
        max_msg_size=WORKER_MESSAGE_BYTES_MAX,
        max_age=_CALLS_AGE_S,
        duplicate_window=_CALLS_AGE_S,
        deny_purge=True,
        allow_direct=False,
        allow_msg_ttl=True,
    ),
    StreamConfig(
        name=DEAD,
        subjects=[subjects.DEAD_LETTERS, subjects.probe(DEAD)],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_msgs_per_subject=_DEAD_LETTERS_MAX,
        max_bytes=_GIB,
        max_msg_size=DEAD_LETTER_BYTES_MAX,
        max_age=_HOUR_S,
        duplicate_window=120,
        deny_delete=True,
        deny_purge=True,
        allow_direct=False,
        allow_msg_ttl=True,
    ),
)


def _consumer(name: str, filter_subject: str, *, in_flight_max: int) -> ConsumerConfig:
    """No back-off: it would silently replace the time to acknowledge."""
    return ConsumerConfig(
        durable_name=name,
        filter_subject=filter_subject,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ACK_WAIT_S,
        max_deliver=DELIVERIES_MAX,
        max_ack_pending=in_flight_max,
    )


_CONSUMERS: Final = (
    (WORK, _consumer(ACTIVATOR, subjects.INVOKES, in_flight_max=_IN_FLIGHT_MAX)),
    (OUT, _consumer(RESULTS, subjects.RESULTS, in_flight_max=_IN_FLIGHT_MAX)),
    (OUT, _consumer(METRICS, subjects.METRICS, in_flight_max=_IN_FLIGHT_MAX)),
    (OUT, _consumer(OUTPUTS, subjects.OUTPUTS, in_flight_max=_IN_FLIGHT_MAX)),
    (CALLS, _consumer(CALLERS, subjects.CALLS, in_flight_max=_IN_FLIGHT_MAX)),
)


async def ensure(bus: Bus) -> None:
    """All streams and the activators' consumers, whatever is there of them."""
    for stream in STREAMS:
        await bus.ensure_stream(stream)
    for stream, consumer in _CONSUMERS:
        await bus.js.add_consumer(stream, consumer)


async def ensure_worker(bus: Bus, *, request: str, worker: str, slots: int) -> None:
    """The consumer that brings one worker its attempts. The server drops it when nobody pulled from it for an hour."""
    consumer = _consumer(worker, subjects.dispatch(request, worker), in_flight_max=slots + _SPARE_SLOTS)
    await bus.js.add_consumer(WORK, consumer, inactive_threshold=_HOUR_S)


async def forget_worker(bus: Bus, worker: str) -> None:
    """Nothing reaches the worker any more; what was on its way ages out. None there is fine."""
    try:
        await bus.js.delete_consumer(WORK, worker)
    except NotFoundError:
        return


class Exhausted(msgspec.Struct, frozen=True):
    """A message that was delivered as often as it may be, and that nobody acknowledged. It stays in its stream, and
    counts against its function's bound there, until somebody deletes it."""

    stream: str
    consumer: str
    stream_seq: int
    deliveries: int


async def on_exhausted(bus: Bus, handle: Callable[[Exhausted], Awaitable[None]], *, queue: str = "activators") -> None:
    """Call `handle` for each such message of WORK and OUT, in one of the processes that share `queue`. A hint: told
    once, and to nobody when nobody listens."""
    decode = msgspec.json.Decoder(Exhausted).decode

    async def told(_: str, payload: bytes) -> None:
        advisory = decode(payload)
        if advisory.stream in (WORK, OUT):
            await handle(advisory)

    await bus.on_hint(subjects.MAX_DELIVERIES, told, queue=queue)


async def keep(bus: Bus, database: Database) -> None:
    """Make whatever is missing, the consumers of living workers too: the server may have lost its store."""
    await ensure(bus)
    async with database.read() as conn:
        living = await workers.living_consumers(conn)
    if not living:
        return
    there = await consumers(bus, WORK)
    for each in living:
        if each.worker not in there:
            await ensure_worker(bus, request=each.request, worker=each.worker, slots=each.slots)


async def consumers(bus: Bus, stream: str) -> set[str]:
    """The names of all consumers: the server lists them by pages of 256."""
    names: set[str] = set()
    offset = 0
    while page := await bus.js.consumers_info(stream, offset=offset):
        names.update(info.name for info in page)
        offset += len(page)
    return names

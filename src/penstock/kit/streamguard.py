"""Notices a stream that takes no more writes although its server answers, says so, and makes it anew.

A file store keeps its first write error, such as of a full disk: the server stays silent to every later publish, with
space or without, until it is restarted or the stream is made anew. Streams hold nothing that Postgres does not know.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from nats.errors import Error
from nats.js.api import StreamConfig
from nats.js.errors import NotFoundError
from prometheus_client import Counter, Gauge

from penstock.kit import conditions
from penstock.kit.bus import Bus
from penstock.kit.conditions import Condition
from penstock.kit.db import Database
from penstock.kit.ids import new_id
from penstock.kit.process import guarded
from penstock.kit.publish import NotStored
from penstock.kit.telemetry import logger
from penstock.wire import subjects

_log = logger(__name__)
#: A stream that wrote nothing for so long, while it was asked to, is made anew.
SILENCE_S: Final = 5.0
_writable = Gauge("penstock_stream_writable", "Whether a stream of NATS stores what is published.", ["stream"])
_rebuilt = Counter("penstock_stream_rebuilds_total", "Streams made anew because they stored nothing.", ["stream"])
#: Probes leave by themselves: the stream must allow it (`allow_msg_ttl`).
_PROBE_TTL_S: Final = 60
KIND: Final = "stream_unwritable"
_REPAIR: Final = "free space on the disk of NATS; the stream is made anew by itself, or restart nats-server"


@dataclass(frozen=True, slots=True)
class _Silence:
    """The stream as it was when it first stayed silent."""

    since: float
    created: object
    last_seq: int


class StreamGuard:
    """Of one stream. Its publishers tell what became of their messages."""

    def __init__(
        self,
        bus: Bus,
        db: Database,
        config: StreamConfig,
        ensure: Callable[[], Awaitable[None]],
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        assert config.name is not None
        self._bus = bus
        self._db = db
        self._name = config.name
        self._ensure = ensure
        self._silence_s = silence_s
        self._silence: _Silence | None = None
        self._said = False
        _writable.labels(self._name).set(1)

    async def probe(self) -> None:
        """Publish a message that nobody reads; for streams whose publishers are elsewhere."""
        if not self._bus.client.is_connected:
            return
        try:
            await self._bus.publish(subjects.probe(self._name), b"", msg_id=new_id("prb"), ttl_s=_PROBE_TTL_S)
        except NotStored as error:
            await self.refused(error)
        else:
            await self.stored()

    async def stored(self) -> None:
        """A message was stored."""
        self._silence = None
        _writable.labels(self._name).set(1)
        if self._said:
            await conditions.clear(self._db, kind=KIND, id=self._name)
            self._said = False
            _log.info("stream_writable", stream=self._name)

    async def refused(self, error: Exception) -> None:
        """A message was not. A reason that the server names is only told; silence that lasts makes the stream anew."""
        _writable.labels(self._name).set(0)
        _log.warning("stream_unwritable", stream=self._name, error=repr(error))
        # The disk of Postgres may be the same one: what cannot be told there must not hold the mending.
        await guarded(self._tell(str(error)), name="stream_condition", stream=self._name)
        if isinstance(error, NotStored) and error.refusal:
            self._silence = None
        elif await self._lasts():
            await self._rebuild()

    async def _tell(self, reason: str) -> None:
        self._said = True
        told = f"{self._name} does not store what is published: {reason}"
        await conditions.report(self._db, Condition(kind=KIND, id=self._name, reason=told, repair=_REPAIR))

    async def _lasts(self) -> bool:
        """Whether nothing at all was written since the first silence. A server that is merely slow has written."""
        now = asyncio.get_running_loop().time()
        try:
            found = await self._bus.js.stream_info(self._name)
        except NotFoundError:
            return False
        except (Error, TimeoutError) as error:
            _log.warning("stream_unknown", stream=self._name, error=repr(error))
            return False
        before, last_seq = self._silence, found.state.last_seq
        if before is None or (before.created, before.last_seq) != (found.created, last_seq):
            self._silence = _Silence(now, found.created, last_seq)
            return False
        return now - before.since >= self._silence_s

    async def _rebuild(self) -> None:
        _log.error("stream_made_anew", stream=self._name)
        _rebuilt.labels(self._name).inc()
        self._silence = None
        await self._bus.js.delete_stream(self._name)
        await self._ensure()

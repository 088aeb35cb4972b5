"""Following the live events, without any I/O: parsing server-sent events, resuming, and when to try again.

The cursor moves only past events that were handed on, so a broken connection neither loses nor repeats one.
"""

import re
from collections.abc import Iterator
from typing import Final

import msgspec

from penstock.sdk.errors import BadAnswer, SdkError, Unreachable
from penstock.sdk.protocol import PREFIX, Request, Steps, backoff_s, call, query_string
from penstock.wire.rest import EventOut, Page
from penstock.wire.unreadable import UNREADABLE

_BUFFER_BYTES_MAX: Final = 4 << 20
_BLANK: Final = re.compile(rb"\r?\n\r?\n")
_BLANK_BYTES_MAX: Final = 4
#: Connections that end without bringing any data, in a row.
_FAILURES_MAX: Final = 8
_AWAY: Final = frozenset({502, 503, 504})


class Blocks:
    """Cuts a stream of server-sent events into blocks, which end with an empty line. Each byte is searched once."""

    def __init__(self, *, bytes_max: int = _BUFFER_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._buffer = bytearray()
        self._searched = 0

    def clear(self) -> None:
        """Begin a new stream."""
        self._buffer.clear()
        self._searched = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The blocks that are complete now, without the empty line."""
        self._buffer += chunk
        while (blank := _BLANK.search(self._buffer, self._searched)) is not None:
            block = bytes(self._buffer[: blank.start()])
            del self._buffer[: blank.end()]
            self._searched = 0
            yield block
        self._searched = max(0, len(self._buffer) - _BLANK_BYTES_MAX + 1)
        if len(self._buffer) > self._bytes_max:
            raise BadAnswer(f"an event is larger than {self._bytes_max} bytes")


class Follower:
    """One subscription across all of its connections."""

    def __init__(self, after: str | None, *, event_type: str | None = None, aggregate_id: str | None = None) -> None:
        self._cursor = after
        self._only = {"event_type": event_type, "aggregate_id": aggregate_id}
        self._blocks = Blocks()
        self._failures = 0

    def begin(self) -> Steps[None]:
        """Find the newest event, so that a connection that breaks before its first event resumes there too."""
        if self._cursor is None:
            newest = yield from call("GET", "/events", Page[EventOut], query={"order": "desc", "limit": 1})
            self._cursor = newest.items[0].cursor if newest.items else None

    def request(self) -> Request:
        """Open the stream where it broke off."""
        self._blocks.clear()
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        if self._cursor:
            headers["Last-Event-ID"] = self._cursor
        return Request(method="GET", path=f"{PREFIX}/events/stream{query_string(self._only)}", headers=headers)

    def feed(self, chunk: bytes) -> list[EventOut]:
        """The events that are complete now."""
        self._failures = 0
        return [event for block in self._blocks.feed(chunk) if (event := self._event(block)) is not None]

    def _event(self, block: bytes) -> EventOut | None:
        lines = [line.removesuffix(b"\r").partition(b":") for line in block.split(b"\n")]
        data = b"\n".join(value.removeprefix(b" ") for name, _, value in lines if name == b"data")
        if not data:
            return None
        try:
            event = msgspec.json.decode(data, type=EventOut)
        except UNREADABLE as error:
            raise BadAnswer(f"an event is not as the API says: {error}") from error
        self._cursor = event.cursor
        return event

    def lost(self, error: SdkError | None) -> float:
        """Seconds to wait before connecting again; raises when that is no use, or keeps failing."""
        self._failures += 1
        if self._failures > _FAILURES_MAX or (error is not None and not _passing(error)):
            raise error or Unreachable("the event stream keeps ending", sent=True)
        return backoff_s(self._failures)


def _passing(error: SdkError) -> bool:
    """Whether the server is away for a moment, rather than refusing."""
    return error.passing if isinstance(error, Unreachable) else error.status in _AWAY

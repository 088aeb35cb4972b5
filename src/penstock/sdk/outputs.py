"""Following what handlers say, without any I/O: server-sent events, resumed where a connection broke off.

The place moves only past lines that were handed on, so a broken connection neither loses nor repeats one.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from penstock.sdk.errors import BadAnswer, SdkError, Unreachable
from penstock.sdk.protocol import PREFIX, Query, Request, backoff_s, query_string
from penstock.sdk.sse import Blocks
from penstock.wire.rest import Invocation, OutputLine
from penstock.wire.unreadable import UNREADABLE

_EVENT_BYTES_MAX: Final = 64 << 20
#: Connections that end without bringing any data, in a row.
_FAILURES_MAX: Final = 8
_AWAY: Final = frozenset({502, 503, 504})

Said = OutputLine | Invocation


class Outputs:
    """One subscription across all of its connections; that of an invocation ends with it."""

    def __init__(self, path: str, *, query: Query | None = None, after: str | None = None) -> None:
        self._path = path
        self._query = query or {}
        self._place = after
        self._blocks = Blocks(bytes_max=_EVENT_BYTES_MAX)
        self._failures = 0
        self.ended = False

    def request(self) -> Request:
        """Open the stream where it broke off."""
        self._blocks.clear()
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        if self._place:
            headers["Last-Event-ID"] = self._place
        return Request(method="GET", path=f"{PREFIX}{self._path}{query_string(self._query)}", headers=headers)

    def feed(self, chunk: bytes) -> Iterator[Said]:
        """The lines that are complete now."""
        self._failures = 0
        for block in self._blocks.feed(chunk):
            yield from self._event(block)
            if self.ended:
                return

    def _event(self, block: bytes) -> Iterator[Said]:
        fields: dict[bytes, bytes] = {}
        for line in block.split(b"\n"):
            name, _, value = line.partition(b":")
            fields[name] = value.removeprefix(b" ").rstrip(b"\r")
        if b"data" not in fields:
            return
        self.ended = fields.get(b"event") == b"end"
        kind = Invocation if self.ended else OutputLine
        try:
            said = msgspec.json.decode(fields[b"data"], type=kind)
        except UNREADABLE as error:
            raise BadAnswer(f"an event is not as the API says: {error}") from error
        yield said
        self._place = fields.get(b"id", b"").decode("ascii", "replace") or self._place

    def lost(self, error: SdkError | None) -> float:
        """Seconds to wait before connecting again; raises when that is no use, or keeps failing."""
        self._failures += 1
        if self._failures > _FAILURES_MAX or (error is not None and not _passing(error)):
            raise error or Unreachable("the stream keeps ending", sent=True)
        return backoff_s(self._failures)


def _passing(error: SdkError) -> bool:
    return error.passing if isinstance(error, Unreachable) else error.status in _AWAY

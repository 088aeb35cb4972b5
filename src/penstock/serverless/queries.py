"""How the routes of functions read what comes with a request: cursors, places, streams."""

import re
from collections.abc import AsyncIterator
from typing import Final

from litestar.response import Stream

from penstock.kit import paging
from penstock.kit.errors import Invalid
from penstock.kit.paging import PageQuery
from penstock.wire.serverless import PAYLOAD_BYTES_MAX

PLACE_MAX: Final = (1 << 63) - 1
#: The routes that take payloads, and what their bodies may have: a payload and what is around it.
PAYLOADS: Final = re.compile(r"/api/v1/(serverless/invocations|functions/[^/]+/map)")
BODY_BYTES_MAX: Final = PAYLOAD_BYTES_MAX + (1 << 20)


def text(page: PageQuery, kind: str) -> str | None:
    """The text in a cursor of this kind."""
    if page.cursor is None:
        return None
    match paging.decode_cursor(page.cursor):
        case [str(found), str(last)] if found == kind:
            return last
        case _:
            raise Invalid("invalid cursor", field="cursor")


def number(page: PageQuery, kind: str) -> int | None:
    """The number in a cursor of this kind."""
    if page.cursor is None:
        return None
    match paging.decode_cursor(page.cursor):
        case [str(found), int(last)] if found == kind:
            return last
        case _:
            raise Invalid("invalid cursor", field="cursor")


def place(last_event_id: str) -> int:
    """Where a stream of a function's lines broke off."""
    return _numbers(last_event_id, 1)[0]


def attempt_and_number(last_event_id: str | None) -> tuple[int, int]:
    """Where a stream of an invocation's lines broke off; from the beginning without an id."""
    if last_event_id in (None, "end"):
        return (0, -1)
    attempt, number = _numbers(last_event_id or "", 2)
    return attempt, number


def stream(events: AsyncIterator[bytes]) -> Stream:
    """Server-sent events."""
    return Stream(events, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


def _numbers(text: str, count: int) -> list[int]:
    parts = text.split(".")
    if len(parts) != count or not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
        raise Invalid("Last-Event-ID must be the id of an event", field="Last-Event-ID")
    if count > 1 and any(int(part) > (1 << 31) - 1 for part in parts):
        raise Invalid("Last-Event-ID must be the id of an event", field="Last-Event-ID")
    return [int(part) for part in parts]

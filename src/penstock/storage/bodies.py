"""The body of an upload, piece by piece, from a client that must keep up a pace."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Final

from litestar.types import Receive

from penstock.kit.edge import Rejected

#: Without a byte for so long, a client is taken for gone.
IDLE_S: Final = 30.0
#: After this time, a body must have come at this pace on average: one that trickles would hold its place for ever.
PATIENCE_S: Final = 60.0
PACE_BYTES_S: Final = 4 << 10


async def chunks(receive: Receive) -> AsyncIterator[bytes]:
    """What the client sends, to its end; Rejected when it leaves or is too slow."""
    began, size = time.monotonic(), 0
    while True:
        try:
            async with asyncio.timeout(IDLE_S):
                message = await receive()
        except TimeoutError as error:
            raise Rejected(408, "request_timeout", f"nothing of the body came for {IDLE_S:g} s") from error
        if message["type"] != "http.request":
            raise Rejected(400, "invalid_request", "the client went away")
        chunk = message.get("body", b"")
        size += len(chunk)
        if time.monotonic() - began > PATIENCE_S + size / PACE_BYTES_S:
            raise Rejected(408, "request_timeout", f"the body comes slower than {PACE_BYTES_S} bytes a second")
        if chunk:
            yield chunk
        if not message.get("more_body", False):
            return

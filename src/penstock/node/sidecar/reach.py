"""Whether the queue can be reached from this node: functions' workers are placed only where it can.

Workers have connections of their own, and a node without workers has none: so this looks by itself, by connecting and
hanging up.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from ssl import SSLContext
from typing import Final
from urllib.parse import urlsplit

from penstock.kit.telemetry import logger

_log = logger(__name__)
_CONNECT_S: Final = 5.0
_NATS_PORT: Final = 4222


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """So often a look while all is well and while it is not. A server that restarts is no news: only after so many
    looks in vain the queue counts as out of reach."""

    look_s: float = 10.0
    again_s: float = 1.0
    misses: int = 5


async def watch(nats_url: str, tls: SSLContext | None, tell: Callable[[bool], None], pace: Pace | None = None) -> None:
    """Look for ever, and `tell` what is found first and each change."""
    pace = pace or Pace()
    told: bool | None = None
    missed = 0
    while True:
        found = await reaches(nats_url, tls)
        missed = 0 if found else missed + 1
        if found is not told and (found or told is None or missed >= pace.misses):
            told = found
            (_log.info if found else _log.warning)("nats_reached" if found else "nats_unreachable", nats_url=nats_url)
            tell(found)
        await asyncio.sleep(pace.look_s if found else pace.again_s)


async def reaches(nats_url: str, tls: SSLContext | None) -> bool:
    """Whether one of the addresses takes connections."""
    for url in nats_url.split(","):
        parts = urlsplit(url)
        # Elsewhere than in WebSockets, TLS begins after the server's first word.
        encrypted = tls if parts.scheme == "wss" else None
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(parts.hostname, parts.port or _NATS_PORT, ssl=encrypted)
            writer.close()
            return True
    return False

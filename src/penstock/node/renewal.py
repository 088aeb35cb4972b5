"""Keeps the node's certificate fresh."""

import asyncio
from contextlib import suppress
from typing import Final

import aiohttp
from prometheus_client import Gauge

from penstock.kit import dialling
from penstock.kit.clock import utc_now
from penstock.kit.errors import PenstockError
from penstock.kit.telemetry import logger
from penstock.node.errors import NodeError
from penstock.node.identity import Identity, usable
from penstock.node.link import Link
from penstock.node.serverclock import ServerClock
from penstock.wire.unreadable import UNREADABLE

_log = logger(__name__)
_RENEW_LOOK_S: Final = 30.0
_RENEW_AGAIN_S: Final = 10.0
_expires = Gauge("penstock_node_certificate_expires_seconds", "When the node's certificate ends, in Unix time.")


async def keep(who: Identity, clock: ServerClock, link: Link) -> None:
    """Renew at two thirds of the certificate's life; look now and then, and whenever the link came back."""
    _expires.set(who.expires_at.timestamp())
    loop = asyncio.get_running_loop()
    not_before = 0.0
    async with aiohttp.ClientSession(connector=dialling.connector()) as session:
        while True:
            now = clock.now() or utc_now()
            if now >= who.renew_at and loop.time() >= not_before:
                await _renew(who, session, link)
                not_before = loop.time() + _RENEW_AGAIN_S
            due_s = (who.renew_at - now).total_seconds()
            link.woken.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_RENEW_LOOK_S, due_s) if due_s > 0 else _RENEW_AGAIN_S):
                    await link.woken.wait()


async def _renew(who: Identity, session: aiohttp.ClientSession, link: Link) -> None:
    try:
        await who.renew(session)
    except (OSError, aiohttp.ClientError, TimeoutError, NodeError, PenstockError, *UNREADABLE) as error:
        hint = "" if usable(who) else "it has expired: start the agent with a recovery token"
        _log.warning("certificate_not_renewed", error=repr(error), hint=hint)
        return
    _expires.set(who.expires_at.timestamp())
    _log.info("certificate_renewed", expires_at=who.expires_at.isoformat())
    link.reconnect()

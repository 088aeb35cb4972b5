"""The nodes' tunnels: held here, or by another gateway to which streams are forwarded.

The row in `access.tunnels` says which of several tunnels of a node is the newest; older ones are closed, here at once
and on other gateways at their next check. A gateway never forwards what was forwarded to it.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import asyncpg
from aiohttp import web
from prometheus_client import Gauge

from penstock.access import store
from penstock.access.errors import NodeUnreachable
from penstock.access.peers import Peers
from penstock.access.ports import Nodes
from penstock.kit.db import Database
from penstock.kit.errors import PenstockError, Unavailable
from penstock.kit.ids import new_id
from penstock.kit.sent import CLOSED
from penstock.kit.stream import Stream
from penstock.kit.streamio import splice
from penstock.kit.telemetry import logger
from penstock.kit.tunnel import Mux
from penstock.kit.websocket import accept
from penstock.wire.link import Close
from penstock.wire.tunnel import FRAME_BYTES_MAX, Open, Target

CHECK_S: Final = 2.0
#: So long a request waits for a node that is not connected: after a gateway's restart it is on its way back.
RETURN_S: Final = 5.0
_RETURN_LOOK_S: Final = 0.25
#: So many requests wait at a time; further ones are answered at once.
_RETURN_WAITING_MAX: Final = 1000
_HOLDER_KEPT_S: Final = 2.0
_HOLDERS_KEPT_MAX: Final = 10_000
#: The database cannot answer; the node comes back, and a row that is left behind is replaced then.
_AWAY: Final = (Unavailable, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError, OSError)

_log = logger(__name__)
_held_gauge = Gauge("penstock_gateway_tunnels", "Nodes whose tunnel this gateway holds")


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A node's tunnel that ends here."""

    node_id: str
    tunnel_id: str
    mux: Mux


class Tunnels:
    """Opens streams to nodes, wherever their tunnel ends."""

    def __init__(
        self,
        db: Database,
        nodes: Nodes,
        peers: Peers,
        *,
        gateway_id: str,
        address: str,
        return_s: float = RETURN_S,
    ) -> None:
        self._db = db
        self._nodes = nodes
        self._peers = peers
        self._gateway_id = gateway_id
        self._address = address
        self._held: dict[str, Held] = {}
        self._holders: dict[str, tuple[float, str]] = {}
        self._forwarding: set[Mux] = set()
        self._registering = asyncio.Lock()
        self._return_s = return_s
        self._waiting = 0

    async def open(self, node_id: str, target: Target) -> Stream:
        """A stream to the node, which may need a moment to connect again. What the node says against it arrives as the
        stream's abort."""
        try:
            return await self._open(node_id, target)
        except NodeUnreachable:
            if self._waiting >= _RETURN_WAITING_MAX:
                raise
        self._waiting += 1
        try:
            return await self._open_later(node_id, target)
        finally:
            self._waiting -= 1

    async def _open_later(self, node_id: str, target: Target) -> Stream:
        deadline = time.monotonic() + self._return_s
        while True:
            await asyncio.sleep(_RETURN_LOOK_S)
            try:
                return await self._open(node_id, target)
            except NodeUnreachable:
                if time.monotonic() >= deadline:
                    raise

    async def _open(self, node_id: str, target: Target) -> Stream:
        held = self._held.get(node_id)
        if held is not None and not held.mux.closed:
            return held.mux.open(target)
        address = await self._holder(node_id)
        if address is None or address == self._address:
            detail = f"the node is not connected, and did not come back within {self._return_s:g} s; try again"
            raise NodeUnreachable(detail, retry_after_s=2)
        try:
            return await self._peers.open(address, target, node_id)
        except NodeUnreachable:
            self._holders.pop(node_id, None)
            raise

    async def _holder(self, node_id: str) -> str | None:
        kept = self._holders.get(node_id)
        if kept is not None and kept[0] > time.monotonic():
            return kept[1]
        async with self._db.read() as conn:
            address = await store.holder(conn, node_id)
        if address is not None:
            if len(self._holders) >= _HOLDERS_KEPT_MAX:
                self._holders.clear()
            self._holders[node_id] = (time.monotonic() + _HOLDER_KEPT_S, address)
        return address

    def add_routes(self, app: web.Application) -> None:
        """Serve nodes and other gateways in this application, which must be behind mTLS."""
        app.router.add_get("/tunnel", self._serve_node)
        app.router.add_get("/peer", self._serve_peer)

    async def check(self) -> None:
        """Close tunnels that were superseded by one on another gateway."""
        held = list(self._held.values())
        if not held:
            return
        async with self._db.read() as conn:
            current = await store.current(conn, [each.tunnel_id for each in held])
        for each in held:
            if each.tunnel_id not in current:
                each.mux.close(Close.SUPERSEDED, "superseded by a newer tunnel")

    async def close(self) -> None:
        """End all; the agents go to another gateway or come back."""
        for mux in [*(each.mux for each in self._held.values()), *self._forwarding]:
            mux.close(Close.RESTARTING, "the gateway stops")

    async def _serve_node(self, request: web.Request) -> web.StreamResponse:
        socket = accept(request, message_bytes_max=FRAME_BYTES_MAX)
        if socket is None:
            return web.Response(status=426, headers={"Upgrade": "websocket"})
        mux = Mux(socket)

        async def cut(reason: str) -> None:
            mux.close(Close.UNAUTHENTICATED, reason)

        try:
            node_id, certified = await self._nodes.admit(request, cut)
            with certified:
                await self._hold(Held(node_id, new_id("tnl"), mux))
        except _AWAY as error:
            _log.warning("tunnel_refused", error=repr(error))
            mux.close(Close.RESTARTING, "try again")
        except PenstockError as error:
            _log.info("tunnel_refused", detail=error.detail)
            mux.close(Close.UNAUTHENTICATED, error.detail)
        await mux.run()
        return CLOSED

    async def _hold(self, held: Held) -> None:
        # One at a time: the row and the registry must agree on which is the newest.
        async with self._registering:
            async with self._db.read() as conn:
                await store.hold(
                    conn,
                    node_id=held.node_id,
                    tunnel_id=held.tunnel_id,
                    gateway_id=self._gateway_id,
                    address=self._address,
                )
            older = self._held.get(held.node_id)
            self._held[held.node_id] = held
        _held_gauge.set(len(self._held))
        _log.info("tunnel_up", node_id=held.node_id)
        if older is not None:
            older.mux.close(Close.SUPERSEDED, "superseded by a newer tunnel")
        try:
            await held.mux.run()
        finally:
            await self._release(held)

    async def _release(self, held: Held) -> None:
        _log.info("tunnel_down", node_id=held.node_id)
        if self._held.get(held.node_id) is held:
            del self._held[held.node_id]
            _held_gauge.set(len(self._held))
        with suppress(*_AWAY):
            async with self._db.read() as conn:
                await store.drop(conn, held.tunnel_id)

    async def _serve_peer(self, request: web.Request) -> web.StreamResponse:
        socket = accept(request, message_bytes_max=FRAME_BYTES_MAX)
        if socket is None:
            return web.Response(status=426, headers={"Upgrade": "websocket"})
        mux = Mux(socket, accept=self._forward)
        if not self._nodes.is_gateway(request):
            socket.close(Close.IDENTITY_MISMATCH, "the certificate is not a gateway's")
        self._forwarding.add(mux)
        try:
            await mux.run()
        finally:
            self._forwarding.discard(mux)
        return CLOSED

    def _forward(self, stream: Stream, frame: Open) -> None:
        """Another gateway wants a node that it believes is here."""
        held = self._held.get(frame.node_id)
        if held is None or held.mux.closed:
            stream.abort("no_node", "the node is not connected to this gateway")
            return
        try:
            splice(stream, held.mux.open(frame.target))
        except PenstockError as error:
            stream.abort("exhausted", error.detail)

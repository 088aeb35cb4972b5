"""Tunnels between gateways: one per pair, opened when first needed and shared by all requests that go there."""

import asyncio
import ssl
from typing import Final

from penstock.access.errors import NodeUnreachable
from penstock.kit.stream import Stream
from penstock.kit.telemetry import logger
from penstock.kit.tunnel import Mux
from penstock.kit.websocket import dial
from penstock.wire.tunnel import FRAME_BYTES_MAX, Target

_log = logger(__name__)
_GATEWAY_NAME: Final = ("URI", "penstock://gateway")
_CONNECT_S: Final = 5.0


class Peers:
    """The other gateways, by the address of their link listener."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self._tls = tls
        self._muxes: dict[str, asyncio.Future[Mux]] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def open(self, address: str, target: Target, node_id: str) -> Stream:
        """A stream to a node that the gateway at `address` holds."""
        try:
            return (await self._mux(address)).open(target, node_id)
        except (OSError, TimeoutError) as error:
            _log.warning("peer_unreachable", address=address, error=repr(error))
            raise NodeUnreachable("the gateway that holds the node cannot be reached; try again") from error

    async def close(self) -> None:
        """End all."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _mux(self, address: str) -> Mux:
        """The tunnel to this gateway; many who need it at once wait for one dial."""
        found = self._muxes.get(address)
        if found is None:
            found = self._muxes[address] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._run(address, found), name=f"peer-{address}")
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        return await asyncio.shield(found)

    async def _run(self, address: str, found: "asyncio.Future[Mux]") -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                mux = await self._dial(address)
            found.set_result(mux)
            await mux.run()
        except (OSError, ssl.SSLError, TimeoutError) as error:
            if not found.done():
                found.set_exception(error)
                found.exception()
        finally:
            found.cancel()
            if self._muxes.get(address) is found:
                del self._muxes[address]

    async def _dial(self, address: str) -> Mux:
        host, _, port = address.rpartition(":")
        socket = await dial(host.strip("[]"), int(port), "/peer", tls=self._tls, message_bytes_max=FRAME_BYTES_MAX)
        names = (socket.get_extra_info("peercert") or {}).get("subjectAltName", ())
        if _GATEWAY_NAME not in names:
            socket.abort()
            raise ConnectionRefusedError("the other side's certificate is not a gateway's")
        return Mux(socket)

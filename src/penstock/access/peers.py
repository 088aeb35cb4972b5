"""Tunnels between gateways: one per pair, opened when first needed and shared by all requests that go there."""

import asyncio
import ssl
from contextlib import AsyncExitStack
from typing import Final

import aiohttp

from penstock.access.errors import NodeUnreachable
from penstock.kit.stream import Stream, StreamAborted
from penstock.kit.streamio import Gulp
from penstock.kit.telemetry import logger
from penstock.kit.tunnel import Mux
from penstock.wire.tunnel import FRAME_BYTES_MAX, Target

_log = logger(__name__)
_GATEWAY_NAME: Final = ("URI", "penstock://gateway")
_CONNECT_S: Final = 5.0
_HEARTBEAT_S: Final = 10.0


class Peers:
    """The other gateways, by the address of their link listener."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None
        self._muxes: dict[str, asyncio.Future[Mux]] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def open(self, address: str, target: Target, node_id: str) -> Stream:
        """A stream to a node that the gateway at `address` holds."""
        try:
            return (await self._mux(address)).open(target, node_id)
        except (StreamAborted, OSError, aiohttp.ClientError, TimeoutError) as error:
            _log.warning("peer_unreachable", address=address, error=repr(error))
            raise NodeUnreachable("the gateway that holds the node cannot be reached; try again") from error

    async def close(self) -> None:
        """End all."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

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
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(_CONNECT_S):
                    mux = await self._dial(stack, address)
                found.set_result(mux)
                await mux.run()
        except (OSError, aiohttp.ClientError, TimeoutError) as error:
            if not found.done():
                found.set_exception(error)
                found.exception()
        finally:
            found.cancel()
            if self._muxes.get(address) is found:
                del self._muxes[address]

    async def _dial(self, stack: AsyncExitStack, address: str) -> Mux:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        connection = await stack.enter_async_context(
            self._session.ws_connect(
                f"wss://{address}/peer",
                ssl=self._tls,
                heartbeat=_HEARTBEAT_S,
                max_msg_size=FRAME_BYTES_MAX + 1,
                timeout=aiohttp.ClientWSTimeout(ws_close=2),  # pyright: ignore[reportCallIssue]
            )
        )
        names = (connection.get_extra_info("peercert") or {}).get("subjectAltName", ())
        if _GATEWAY_NAME not in names:
            raise ConnectionRefusedError("the other side's certificate is not a gateway's")
        Gulp.client(connection)
        return Mux(connection)

"""Functions' code for nodes: `GET /code/<allocation>` on the mTLS listener. Whether there is any for the node that asks
is the port's to say."""

from collections.abc import AsyncIterator
from typing import Final

from aiohttp import web

from penstock.fleet.linkserver import failure
from penstock.fleet.peer import Peers
from penstock.fleet.ports import Codes
from penstock.kit.errors import PenstockError
from penstock.kit.ids import check_id, new_id
from penstock.kit.telemetry import correlated

_TYPE: Final = "application/gzip"


class CodeServer:
    """Streams archives to nodes."""

    def __init__(self, peers: Peers, codes: Codes) -> None:
        self._peers = peers
        self._codes = codes

    def add_routes(self, app: web.Application) -> None:
        """Serve code in this application."""
        app.router.add_get("/code/{allocation_id}", self._serve)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        with correlated(new_id("cor")):
            try:
                peer = await self._peers.identify(request)
                allocation_id = check_id("alc", request.match_info["allocation_id"], field="allocation_id")
                size, pieces = await self._codes.open(node_id=peer.node_id, allocation_id=allocation_id)
            except PenstockError as error:
                return failure(error)
            return await _send(request, size, pieces)


async def _send(request: web.Request, size: int, pieces: AsyncIterator[bytes]) -> web.StreamResponse:
    """The length goes ahead: should the store fail on the way, the node sees that something is missing."""
    response = web.StreamResponse(headers={"Content-Type": _TYPE, "Content-Length": str(size)})
    await response.prepare(request)
    async for piece in pieces:
        await response.write(piece)
    await response.write_eof()
    return response

"""Who is at the other end of a connection to the mTLS listener, and whether they still may be.

The certificate is read from the TLS connection itself, never from a header. Every connection and request is checked
against the issued and revoked serials, and sockets that live on are checked again together, in one query.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from aiohttp import web

from penstock.fleet.errors import CertificateRefused
from penstock.fleet.pki import GATEWAY_URI, NODE_URI
from penstock.fleet.store import certificates
from penstock.kit.db import Database
from penstock.kit.ids import is_id

#: A revoked node is out within five seconds: the check comes round well before that.
CHECK_S: Final = 2.0

Cut: TypeAlias = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Peer:
    """A node with a certificate of ours."""

    node_id: str
    serial: str


def uris_of(request: web.BaseRequest) -> list[str]:
    """The URIs that the CA wrote into the peer's certificate."""
    return [value for kind, value in _certificate(request).get("subjectAltName", ()) if kind == "URI"]


def is_gateway(request: web.BaseRequest) -> bool:
    """Whether another gateway is at the other end."""
    return uris_of(request) == [GATEWAY_URI]


def peer_of(request: web.BaseRequest) -> Peer:
    """What the certificate says; not yet whether it was revoked."""
    uris = uris_of(request)
    node_id = uris[0].removeprefix(NODE_URI) if len(uris) == 1 else ""
    if not is_id("nod", node_id):
        raise CertificateRefused("the certificate is not a node's")
    return Peer(node_id, _certificate(request).get("serialNumber", ""))


def _certificate(request: web.BaseRequest) -> dict[str, Any]:
    transport = request.transport
    found = transport.get_extra_info("peercert") if transport is not None else None
    return found or {}


class Peers:
    """Checks certificates, and cuts off sockets whose certificate is no longer good."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._held: dict[object, tuple[Peer, Cut]] = {}
        self._cutting: set[asyncio.Task[None]] = set()

    async def identify(self, request: web.BaseRequest) -> Peer:
        """The node at the other end, if its certificate is good now."""
        peer = peer_of(request)
        async with self._db.read() as conn:
            good = await certificates.good(conn, [peer.serial])
        if not good:
            raise CertificateRefused("the certificate was revoked or has expired", node_id=peer.node_id)
        return peer

    async def node_id_of(self, request: web.BaseRequest) -> str:
        """The id of the node at the other end, if its certificate is good now."""
        return (await self.identify(request)).node_id

    @contextmanager
    def hold(self, peer: Peer, cut: Cut) -> Iterator[None]:
        """While inside, `cut(reason)` is called as soon as the certificate is revoked or runs out."""
        place = object()
        self._held[place] = (peer, cut)
        try:
            yield
        finally:
            self._held.pop(place, None)

    async def check(self) -> None:
        """Look at all held sockets at once."""
        held = dict(self._held)
        if not held:
            return
        async with self._db.read() as conn:
            good = await certificates.good(conn, list({peer.serial for peer, _ in held.values()}))
        for place, (peer, cut) in held.items():
            if peer.serial not in good and self._held.pop(place, None):
                self._cut(cut)

    def _cut(self, cut: Cut) -> None:
        task = asyncio.ensure_future(cut("the certificate was revoked or has expired"))
        self._cutting.add(task)
        task.add_done_callback(self._cutting.discard)

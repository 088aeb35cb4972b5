"""One node's live connection, and all of them that a gateway holds."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, TypeAlias

import msgspec
from aiohttp import web

from penstock.fleet import metrics
from penstock.fleet.store.links import LinkKey
from penstock.wire.link import Close, FromGateway, GpuReport, Heartbeat, UnitReport

#: However many an agent asks for, it gets no more than this before it answers.
OWED_MAX: Final = 64
_SEND_S: Final = 10.0
_CLOSE_S: Final = 2.0
_REASON_BYTES_MAX: Final = 123
#: Less than what makes a send wait.
_UNSENT_BYTES_MAX: Final = 32 << 10

Report: TypeAlias = tuple[list[UnitReport], list[GpuReport]]

_encoder = msgspec.msgpack.Encoder()


class Socket:
    """A WebSocket with bounded sends and an end that does not depend on the other side."""

    def __init__(self, request: web.Request, response: web.WebSocketResponse) -> None:
        self._transport = request.transport
        self._response = response

    async def send(self, frame: FromGateway) -> None:
        """Send, or TimeoutError when the agent does not read."""
        async with asyncio.timeout(_SEND_S):
            await self._response.send_bytes(_encoder.encode(frame))

    async def post(self, encoded: bytes) -> None:
        """Send what may get lost: it is dropped when the agent does not read, and never waits for that."""
        transport = self._transport
        if transport is not None and transport.get_write_buffer_size() < _UNSENT_BYTES_MAX:
            with suppress(OSError):
                await self._response.send_bytes(encoded)

    async def close(self, code: Close, reason: str) -> None:
        """Say why and end, at once if the agent does not take part."""
        if self._response.closed:
            return
        metrics.LINKS_REFUSED.labels(str(int(code))).inc()
        message = reason.encode()[:_REASON_BYTES_MAX].decode(errors="ignore").encode()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._response.close(code=code, message=message)
        except TimeoutError:
            if self._transport is not None:
                self._transport.abort()


class Link:
    """What a gateway knows of a live link. `owed` are the tasks sent and not yet answered."""

    def __init__(self, key: LinkKey, socket: Socket, on_wake: "Callable[[Link], None]") -> None:
        self.key = key
        self.socket = socket
        self._on_wake = on_wake
        self.owed: set[str] = set()
        self.asked = 0
        self.skewed = False
        #: The newest heartbeat that is not yet in the database, with its skew.
        self.heartbeat: tuple[Heartbeat, float] | None = None
        #: What the database has of the node's units and GPUs.
        self.stored: Report | None = None
        #: And of whether it serves functions.
        self.serves_functions: bool | None = None

    @property
    def free(self) -> int:
        """How many more tasks the agent takes."""
        return min(self.asked, OWED_MAX) - len(self.owed)

    def ask(self, count: int) -> None:
        """The agent is ready for this many in all."""
        self.asked = count
        self.wake()

    def answered(self, task_id: str) -> None:
        """One task less is owed."""
        self.owed.discard(task_id)
        self.wake()

    def wake(self) -> None:
        """There may be something to send."""
        self._on_wake(self)


class Links:
    """The links of this gateway. A node can have two for a moment, until the database has told which is newer."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}
        self._by_node: dict[str, set[str]] = {}

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._links.values()))

    def __len__(self) -> int:
        return len(self._links)

    def add(self, link: Link) -> None:
        """A link stands."""
        self._links[link.key.link_id] = link
        self._by_node.setdefault(link.key.node_id, set()).add(link.key.link_id)
        metrics.LINKS.set(len(self._links))

    def remove(self, link: Link) -> None:
        """A link ended."""
        self._links.pop(link.key.link_id, None)
        siblings = self._by_node.get(link.key.node_id, set())
        siblings.discard(link.key.link_id)
        if not siblings:
            self._by_node.pop(link.key.node_id, None)
        metrics.LINKS.set(len(self._links))

    def spread_s(self, accepts_per_s: float) -> float:
        """In how many seconds all of them could come back, should they break at once."""
        return len(self._links) / accepts_per_s

    def of_node(self, node_id: str) -> list[Link]:
        """The node's links here."""
        return [self._links[link_id] for link_id in self._by_node.get(node_id, ())]

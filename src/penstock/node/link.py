"""The node's side of the link: it dials out, proves who it is, asks for tasks and sends results until acknowledged.

The connection may break at any time. Results wait in `Outbox` and are sent again on the next connection; the gateway
knows duplicates.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn, Protocol

import aiohttp
import msgspec
from prometheus_client import Counter, Gauge

from penstock.kit import dialling
from penstock.kit.clock import utc_now
from penstock.kit.telemetry import logger
from penstock.node import procfs
from penstock.node.errors import NodeError, Unlinked
from penstock.node.health import Health, Unwatched
from penstock.node.identity import Identity, check_gateway
from penstock.node.inventory import Inventory
from penstock.node.logs import Forwarder
from penstock.node.pace import Crowd, Pace
from penstock.node.secrets import Secrets
from penstock.node.serverclock import ServerClock
from penstock.node.tasks import CONCURRENCY
from penstock.wire.link import (
    FRAME_BYTES_MAX,
    PROTOCOL_VERSIONS,
    TROUBLE_CHARS_MAX,
    Ask,
    Challenge,
    FromAgent,
    FromGateway,
    Heartbeat,
    HeartbeatAck,
    Hello,
    LogLines,
    Refused,
    ResultAck,
    SecretsAsk,
    SecretValues,
    TaskResult,
    Tasks,
    UnitReport,
    Welcome,
)
from penstock.wire.tasks import SignedTask
from penstock.wire.unreadable import UNREADABLE

_log = logger(__name__)
_CONNECT_S: Final = 10.0
_HANDSHAKE_S: Final = 15.0
_PING_S: Final = 20.0
_SEND_S: Final = 10.0
_RESEND_S: Final = 30.0
_HEARTBEAT_S_MIN: Final = 0.05
#: A unit that ends is reported at once, but heartbeats are never closer than this.
_HEARTBEAT_PAUSE_S: Final = 0.25
#: Something that the agent can do nothing about but waiting.
_DOWN: Final = (OSError, aiohttp.ClientError, TimeoutError, NodeError)
_linked = Gauge("penstock_node_linked", "Whether the link to a gateway stands.")
_connects = Counter("penstock_node_link_connects_total", "Links that stood.")
_heartbeats = Counter("penstock_node_heartbeats_total", "Heartbeats that a gateway has acknowledged.")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FromGateway)


class Journal(Protocol):
    """Where results are kept until they are acknowledged."""

    async def acknowledge(self, task_id: str) -> None:
        """The gateway has this one."""
        ...


class Units(Protocol):
    """The units of this node, as heartbeats tell of them."""

    #: Set whenever a unit ended, or a GPU's health changed.
    changed: asyncio.Event

    def reports(self) -> list[UnitReport]:
        """The complete list."""
        ...


class Outbox:
    """Results that no gateway has acknowledged yet."""

    def __init__(self) -> None:
        self._results: dict[str, TaskResult] = {}
        self._fresh: asyncio.Queue[TaskResult] = asyncio.Queue()

    def put(self, result: TaskResult) -> None:
        """To be sent until acknowledged."""
        self._results[result.task_id] = result
        self._fresh.put_nowait(result)

    def acknowledged(self, task_id: str) -> None:
        """Sent and committed."""
        self._results.pop(task_id, None)

    def again(self) -> None:
        """Queue everything that is not acknowledged, once."""
        while not self._fresh.empty():
            self._fresh.get_nowait()
        for result in self._results.values():
            self._fresh.put_nowait(result)

    async def take(self) -> TaskResult:
        """The next one to send."""
        while (result := await self._fresh.get()).task_id not in self._results:
            pass
        return result


class Link:
    """Keeps one link to a gateway standing."""

    def __init__(
        self,
        *,
        identity: Identity,
        clock: ServerClock,
        journal: Journal,
        units: Units,
        inventory: Inventory,
        logs: Forwarder,
        outbox: Outbox,
        submit: Callable[[SignedTask], None],
        version: str,
        production: bool,
        serves_functions: Callable[[], bool] = lambda: False,
        trouble: Callable[[], str] = lambda: "",
        health: Health | None = None,
        secrets: Secrets | None = None,
        crowd: Crowd | None = None,
    ) -> None:
        self._identity = identity
        self._clock = clock
        self._journal = journal
        self._units = units
        self._inventory = inventory
        self._health = health or Unwatched(inventory)
        self._logs = logs
        self._outbox = outbox
        self._secrets = secrets or Secrets()
        self._submit = submit
        self._version = version
        self._production = production
        self._serves_functions = serves_functions
        self._trouble = trouble
        self._again = asyncio.Event()
        self.crowd = crowd or Crowd()
        self._pace = Pace(self.crowd)
        self.standing = False
        self.woken = asyncio.Event()

    async def run(self) -> NoReturn:
        """Dial, serve, and dial again for ever, with a jittered pause after failures."""
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            try:
                await self._serve_once()
                _log.info("link_closed")
            except* _DOWN as errors:
                _log.warning("link_down", error=_first(errors))
            finally:
                self.standing = False
                _linked.set(0)
            await asyncio.sleep(self._pace.pause_s(stood_s=loop.time() - started))

    def reconnect(self) -> None:
        """Make a new link, as after a renewal: the old one ends with the old certificate."""
        self._again.set()

    async def _serve_once(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        async with (
            aiohttp.ClientSession(connector=dialling.connector(), timeout=timeout) as session,
            session.ws_connect(
                self._identity.socket_url("/link"),
                ssl=self._identity.tls(),
                heartbeat=_PING_S,
                # The limit of aiohttp is the first size that it refuses.
                max_msg_size=FRAME_BYTES_MAX + 1,
                timeout=aiohttp.ClientWSTimeout(ws_close=2),  # pyright: ignore[reportCallIssue]
            ) as socket,
        ):
            check_gateway(socket.get_extra_info("peercert"))
            async with asyncio.timeout(_HANDSHAKE_S):
                welcome = await self._handshake(socket)
            await self._stand(socket, welcome)

    async def _handshake(self, socket: aiohttp.ClientWebSocketResponse) -> Welcome:
        challenge = await _receive(socket)
        if not isinstance(challenge, Challenge):
            raise Unlinked("protocol", "the gateway did not begin with a challenge")
        shared = set(PROTOCOL_VERSIONS) & set(challenge.protocol_versions)
        if not shared:
            raise Unlinked("unsupported_version", f"the gateway speaks only {challenge.protocol_versions}")
        hello = Hello(
            protocol_version=max(shared),
            node_id=self._identity.node_id,
            nonce=challenge.nonce,
            agent_version=self._version,
            boot_id=procfs.boot_id(),
            inventory=await asyncio.to_thread(self._inventory.listing),
            production=self._production,
            serves_functions=self._serves_functions(),
        )
        await _send(socket, hello)
        welcome = await _receive(socket)
        if isinstance(welcome, Refused):
            self._pace.busy(welcome.retry_after_s)
            raise Unlinked(welcome.code, welcome.detail)
        if not isinstance(welcome, Welcome):
            raise Unlinked("protocol", "the gateway did not welcome this node")
        return welcome

    async def _stand(self, socket: aiohttp.ClientWebSocketResponse, welcome: Welcome) -> None:
        self._clock.tell(welcome.server_time)
        self.crowd.tell(welcome.spread_s)
        self.standing = True
        self._again.clear()
        self.woken.set()
        _linked.set(1)
        _connects.inc()
        _log.info("link_up", gateway_id=welcome.gateway_id, slots_approved=welcome.slots_approved)
        self._outbox.again()
        self._secrets.again()
        await _send(socket, Ask(count=CONCURRENCY))
        async with asyncio.TaskGroup() as group:
            sides = [
                group.create_task(self._heartbeats(socket, max(_HEARTBEAT_S_MIN, welcome.heartbeat_s))),
                group.create_task(self._send_results(socket)),
                group.create_task(self._send_logs(socket)),
                group.create_task(self._send_questions(socket)),
                group.create_task(self._hang_up(socket)),
            ]
            await self._receive_all(socket)
            for side in sides:
                side.cancel()

    async def _hang_up(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        await self._again.wait()
        await socket.close()

    async def _receive_all(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        with suppress(_Closed):
            while True:
                await self._take(await _receive(socket))

    async def _take(self, frame: FromGateway) -> None:
        match frame:
            case Tasks(tasks=tasks):
                for signed in tasks:
                    self._submit(signed)
            case ResultAck(task_id=task_id, verdict=verdict):
                self._outbox.acknowledged(task_id)
                await self._journal.acknowledge(task_id)
                _log.debug("result_acknowledged", task_id=task_id, verdict=verdict.value)
            case HeartbeatAck(server_time=server_time, spread_s=spread_s):
                self._clock.tell(server_time)
                self.crowd.tell(spread_s)
                _heartbeats.inc()
            case SecretValues() as values:
                self._secrets.answer(values)
            case Refused(code=code, detail=detail):
                _log.warning("gateway_refused", code=code, detail=detail)
            case Challenge() | Welcome():
                raise Unlinked("protocol", "the gateway began twice")

    async def _heartbeats(self, socket: aiohttp.ClientWebSocketResponse, every_s: float) -> None:
        while True:
            # Before the look: what changes during it is told with the next one, at once.
            self._units.changed.clear()
            gpus, readings = await asyncio.to_thread(self._health.look)
            units = self._units.reports()
            heartbeat = Heartbeat(
                sent_at=utc_now(),
                units=units,
                gpus=gpus,
                readings=readings,
                serves_functions=self._serves_functions(),
                trouble=self._trouble()[:TROUBLE_CHARS_MAX],
            )
            await _send(socket, heartbeat)
            await asyncio.sleep(min(every_s, _HEARTBEAT_PAUSE_S))
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, every_s - _HEARTBEAT_PAUSE_S)):
                    await self._units.changed.wait()

    async def _send_results(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            try:
                async with asyncio.timeout(_RESEND_S):
                    result = await self._outbox.take()
            except TimeoutError:
                self._outbox.again()
                continue
            await _send(socket, result)

    async def _send_logs(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            await _send(socket, LogLines(lines=await self._logs.take()))

    async def _send_questions(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            await _send(socket, SecretsAsk(task_id=await self._secrets.take()))


class _Closed(Unlinked):
    """The gateway ended the link."""


def _first(errors: BaseExceptionGroup[BaseException]) -> str:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return repr(error)


async def _send(socket: aiohttp.ClientWebSocketResponse, frame: FromAgent) -> None:
    async with asyncio.timeout(_SEND_S):
        await socket.send_bytes(_encoder.encode(frame))


def decode(data: bytes) -> FromGateway:
    """A frame of a gateway's; Unlinked for anything else."""
    try:
        return _decoder.decode(data)
    except UNREADABLE as error:
        raise Unlinked("protocol", f"a frame cannot be read: {error}") from error


async def _receive(socket: aiohttp.ClientWebSocketResponse) -> FromGateway:
    message = await socket.receive()
    if message.type is aiohttp.WSMsgType.BINARY:
        return decode(message.data)
    if message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED):
        raise _Closed("closed", f"the gateway closed the link with {socket.close_code}: {message.extra or ''}")
    raise Unlinked("protocol", f"unexpected {message.type.name} frame")

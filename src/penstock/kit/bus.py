"""NATS: durable events on JetStream, lossy hints on core NATS.

Nothing is believed for having arrived: a hint only says "look again", and every consumer checks with Postgres.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from ssl import SSLContext
from typing import Any, Final, Protocol

from nats.aio.client import PING_PROTO, PONG_PROTO, Client, Srv
from nats.aio.msg import Msg
from nats.errors import ConnectionClosedError, Error, NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, NotFoundError

from penstock.kit.publish import Acknowledged, PubAck, Publisher
from penstock.kit.telemetry import logger
from penstock.wire import subjects

_log = logger(__name__)
_WEEK_S: Final = 7 * 24 * 3600
#: For what stands in the buffers when a connection is closed; a server that hangs may not hold a process for long.
_DRAIN_S: Final = 2
#: JetStream's number for a change that a stream does not allow.
_UNCHANGEABLE: Final = 10052

EVENTS: Final = StreamConfig(
    name="EVENTS",
    subjects=[subjects.ALL_EVENTS],
    retention=RetentionPolicy.LIMITS,
    discard=DiscardPolicy.OLD,
    storage=StorageType.FILE,
    max_age=_WEEK_S,
    max_msg_size=1 << 20,
    duplicate_window=120,
    allow_direct=False,
)


class Follower(Protocol):
    """Somebody who has to do something when the connection breaks or comes back."""

    async def disconnected(self) -> None:
        """It is broken. What is unsubscribed now is not subscribed again when it comes back."""
        ...

    async def reconnected(self) -> None:
        """It is there again."""
        ...


class Bus:
    """One NATS connection of a process."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.js: JetStreamContext = client.jetstream(timeout=5, publish_async_max_pending=4096)
        self._background: set[asyncio.Task[None]] = set()
        self._publisher = Publisher(client)
        self._followers: list[Follower] = []

    async def publish(
        self, subject: str, body: bytes, *, msg_id: str, headers: Mapping[str, str] | None = None, ttl_s: int = 0
    ) -> PubAck:
        """Publish to the stream that takes this subject, and wait until it has the message."""
        return await (await self._publisher.send(subject, body, msg_id=msg_id, headers=headers, ttl_s=ttl_s))

    async def publish_soon(
        self, subject: str, body: bytes, *, msg_id: str, headers: Mapping[str, str] | None = None
    ) -> Acknowledged:
        """The same without waiting for the stream: await what is returned, or the refusal goes unseen."""
        return await self._publisher.send(subject, body, msg_id=msg_id, headers=headers)

    def follow(self, follower: "Follower") -> None:
        """Tell it when the connection breaks and when it is there again."""
        self._followers.append(follower)

    def unfollow(self, follower: "Follower") -> None:
        """No longer."""
        self._followers.remove(follower)

    async def disconnected(self) -> None:
        """For the connection: it is broken."""
        for follower in list(self._followers):
            await follower.disconnected()

    async def reconnected(self) -> None:
        """For the connection: it is there again, with its subscriptions."""
        for follower in list(self._followers):
            await follower.reconnected()

    def hint(self, subject: str, payload: bytes = b"") -> None:
        """Fire and forget; lost when NATS is away, which sweepers make up for."""
        task = asyncio.get_running_loop().create_task(self._publish(subject, payload))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _publish(self, subject: str, payload: bytes) -> None:
        try:
            if self.client.is_connected:
                await self.client.publish(subject, payload)
        except Exception as error:  # noqa: BLE001 (a hint may be lost, its sender must not fail)
            _log.debug("hint_lost", subject=subject, error=repr(error))

    async def on_hint(self, subject: str, handle: Callable[[str, bytes], Awaitable[None]], *, queue: str = "") -> None:
        """Call `handle(subject, payload)` for each hint, in one of the processes that share `queue`."""

        async def receive(message: Msg) -> None:
            try:
                await handle(message.subject, message.data)
            except Exception:  # noqa: BLE001 (the subscription outlives one bad hint)
                _log.exception("hint_failed", subject=message.subject)

        await self.client.subscribe(subject, queue=queue, cb=receive, pending_msgs_limit=65536)

    async def ask(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes | None:
        """Another process's answer; none when nobody answers in time. For people's questions, never for decisions."""
        try:
            return (await self.client.request(subject, payload, timeout=timeout_s)).data
        except (NatsTimeoutError, NoRespondersError, ConnectionClosedError):
            return None

    async def on_ask(self, subject: str, answer: Callable[[bytes], Awaitable[bytes]], *, queue: str) -> None:
        """Answer questions, in one of the processes that share `queue`; a failure leaves the question unanswered."""

        async def receive(message: Msg) -> None:
            try:
                await message.respond(await answer(message.data))
            except Exception:  # noqa: BLE001 (the subscription outlives one bad question)
                _log.exception("ask_failed", subject=message.subject)

        await self.client.subscribe(subject, queue=queue, cb=receive, pending_msgs_limit=256)

    async def ensure_stream(self, config: StreamConfig) -> None:
        """Create the stream, or bring it to this configuration. Where the server does not allow the change, the stream
        is made anew: Postgres knows what was in it."""
        assert config.name is not None
        try:
            await self.js.stream_info(config.name)
        except NotFoundError:
            await self.js.add_stream(config)
            return
        try:
            await self.js.update_stream(config)
        except APIError as error:
            if error.err_code != _UNCHANGEABLE:
                raise
            _log.warning("stream_made_anew", stream=config.name, reason=error.description)
            await self.js.delete_stream(config.name)
            await self.js.add_stream(config)


class _Client(Client):
    """A connection that comes back whatever the server says before it hangs up: for nats-py an expired identity is the
    end, here the next attempt may well be given a new one. And one whose `flush` waits for what was sent before it:
    nats-py's own ping overtakes subscriptions that still stand in the buffer. And one that goes on reading when who
    waited for a pong was cancelled, and that can be asked for a sign of life before it is let in. And one that takes
    `tls://` and `wss://` at their word, where nats-py would go on in plain text: with a server that does not insist, or
    with the next one."""

    @property
    def _insists_on_tls(self) -> bool:
        return self._current_server is not None and self._current_server.uri.scheme == "tls"

    async def _connect_to_server(self, s: Srv) -> None:
        # nats-py's own limit does not hold for WebSockets.
        async with asyncio.timeout(self.options["connect_timeout"]):
            await super()._connect_to_server(s)

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
        except BaseException:
            if self._insists_on_tls and self._transport is not None:
                # One that broke while it became encrypted never tells its end, for which nats-py would wait.
                self._transport.close()
                self._transport = None
            raise
        if self.is_connecting:
            # Who we are took the server so long to find out that it asked for a sign of life before it answered ours:
            # nats-py would wait for ever. The answer is read like everything else from here on.
            self._pongs.append(asyncio.get_running_loop().create_future())
            await self._send_command(PONG_PROTO)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if self._current_server is not None and self._current_server.uri.scheme == "wss":
            # Other servers of a cluster, which nats-py would dial as `nats://`.
            info.pop("connect_urls", None)
        if initial_connection and self._insists_on_tls:
            # What nats-py looks at for whether to encrypt.
            info["tls_required"] = bool(info.get("tls_required") or info.get("tls_available"))
            if not info["tls_required"]:
                raise Error("nats: the server does not speak TLS")
        await super()._process_info(info, initial_connection)

    async def _process_err(self, err_msg: str) -> None:
        if "permissions violation" in err_msg:
            await super()._process_err(err_msg)
        else:
            await self._process_op_err(Error(f"nats: {err_msg}"))

    async def _send_ping(self, future: "asyncio.Future[bool] | None" = None) -> None:
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        await self._send_command(PING_PROTO)
        await self._flush_pending()

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()
        if self.is_connecting:
            self._status = Client.CONNECTED
        if self._flusher_task is not None and self._flusher_task.done():
            self._flusher_task = asyncio.get_running_loop().create_task(self._flusher())
            await self._flush_pending()


@asynccontextmanager
async def connect(
    url: str,
    *,
    name: str,
    user: str | None = None,
    password: str | None = None,
    inbox_prefix: str = "_INBOX",
    again_s: float = 0.2,
    tls: SSLContext | None = None,
) -> AsyncIterator[Bus]:
    """Connect, keep reconnecting for ever, and drain at the end. NATS may be away when the process starts. `tls` is for
    `tls://` and `wss://` addresses; without it the system's authorities are trusted."""

    async def on_error(error: Exception) -> None:
        _log.debug("nats_error", error=repr(error))

    client = _Client()
    bus = Bus(client)
    try:
        await client.connect(
            url,
            name=name,
            user=user,
            password=password,
            inbox_prefix=inbox_prefix,
            tls=tls,
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=again_s,  # pyright: ignore[reportArgumentType]  (a fraction is fine)
            connect_timeout=4,
            ping_interval=10,
            drain_timeout=_DRAIN_S,
            error_cb=on_error,
            disconnected_cb=bus.disconnected,
            reconnected_cb=bus.reconnected,
        )
        yield bus
    finally:
        await _close(client)


async def _close(client: Client) -> None:
    """To the end, also when the one who closes is cancelled meanwhile: half a drain would lose what it has sent."""
    closing = asyncio.create_task(_drain(client))
    cancelled: asyncio.CancelledError | None = None
    while not closing.done():
        try:
            await asyncio.wait((closing,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _drain(client: Client) -> None:
    try:
        async with asyncio.timeout(_DRAIN_S + 1):
            await client.drain()
    except Exception:  # noqa: BLE001 (closing must not hide why the process ends)
        await client.close()

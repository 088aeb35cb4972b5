"""The gateway's side of the node link: `GET /link` and `POST /renew` on the mTLS listener.

A link stands when the certificate is good, the agent has echoed this connection's nonce and named the node of its
certificate, and the link's row is committed. The row says which of several links of a node is the newest; the older
ones are closed. Tasks leave only for the newest link, and never more than the agent asked for.
"""

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

import msgspec
from aiohttp import WSMsgType, web

from penstock.fleet import disclosure, frames, metrics, tasks
from penstock.fleet.admission import Admission, Busy
from penstock.fleet.courier import AWAY, Courier
from penstock.fleet.enrolment import Enrolment
from penstock.fleet.errors import CertificateRefused
from penstock.fleet.heartbeats import READINGS_S, DatabaseClock, Heartbeats
from penstock.fleet.link import Link, Links, Socket
from penstock.fleet.model import Config
from penstock.fleet.peer import CHECK_S, Peer, Peers
from penstock.fleet.ports import UNHEARD, Handoffs, Secrets
from penstock.fleet.store import links as link_rows
from penstock.fleet.store import tasks as task_rows
from penstock.kit import jsonbody
from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.kit.errors import PenstockError
from penstock.kit.ids import new_id
from penstock.kit.process import every
from penstock.kit.statuses import STATUS
from penstock.kit.telemetry import correlated, correlation_id, logger
from penstock.wire import subjects
from penstock.wire.link import (
    FRAME_BYTES_MAX,
    LOG_LINE_BYTES_MAX,
    Ask,
    Challenge,
    Close,
    Heartbeat,
    Hello,
    LogLine,
    LogLines,
    Refused,
    ResultAck,
    SecretsAsk,
    SecretValues,
    TaskResult,
    Welcome,
)
from penstock.wire.rest import ErrorBody, ErrorDetail, RenewRequest

FLUSH_S: Final = 1.0
_HELLO_S: Final = 10.0
_PING_S: Final = 20.0
_RENEW_BYTES_MAX: Final = 16 << 10
#: Between two looks, however many hints come.
_LOOK_PAUSE_S: Final = 0.05

_log = logger(__name__)
_renew_decoder = msgspec.json.Decoder(RenewRequest)

OnLogs = Callable[[str, Sequence[LogLine]], Awaitable[None]]


class Refusal(Exception):
    """Why a link does not stand."""

    def __init__(self, code: Close, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


async def log_lines(node_id: str, lines: Sequence[LogLine]) -> None:
    """What happens to units' output until somebody wants it."""
    for line in lines:
        _log.debug("unit_output", node_id=node_id, unit_id=line.unit_id, stream=line.stream, text=line.text)


class LinkServer:
    """The link listener of one gateway process."""

    def __init__(
        self,
        db: Database,
        bus: Bus,
        enrolment: Enrolment,
        secrets: Secrets,
        *,
        gateway_id: str,
        address: str,
        config: Config,
        on_logs: OnLogs = log_lines,
        handoffs: Handoffs = UNHEARD,
    ) -> None:
        self.peers = Peers(db)
        self._db = db
        self._bus = bus
        self._enrolment = enrolment
        self._secrets = secrets
        self._gateway_id = gateway_id
        self._config = config
        self._on_logs = on_logs
        self._handoffs = handoffs
        self._links = Links()
        self._clock = DatabaseClock()
        self._heartbeats = Heartbeats(db, self._links, self._clock, accepts_per_s=config.accepts_per_s)
        self._admission = Admission(db, gateway_id=gateway_id, address=address, accepts_per_s=config.accepts_per_s)
        self._courier = Courier(db, config)
        self._look = asyncio.Event()

    @property
    def crowded(self) -> bool:
        """Whether many hellos wait already."""
        return self._admission.crowded

    def add_routes(self, app: web.Application) -> None:
        """Serve the link and renewal in this application."""
        app.router.add_get("/link", self._serve)
        app.router.add_post("/renew", self._renew)

    async def run(self) -> None:
        """Look after all links until cancelled."""
        await self._bus.on_hint(subjects.REVOKED, self._revoked)
        await self._bus.on_hint(subjects.ALL_NODES, self._node_changed)
        async with asyncio.TaskGroup() as group:
            group.create_task(every(FLUSH_S, self._heartbeats.flush, name="link_heartbeats"))
            group.create_task(every(READINGS_S, self._heartbeats.flush_readings, name="link_readings"))
            group.create_task(every(0, self._courier.deliver, name="link_tasks"))
            group.create_task(every(_LOOK_PAUSE_S, self._look_around, name="link_check"))
            group.create_task(every(CHECK_S, self._keep_leases, name="link_leases"))
            group.create_task(every(CHECK_S, self._listen, name="link_listen"))

    async def close(self) -> None:
        """End all links; the agents go to another gateway or come back."""
        closing = [link.socket.close(Close.RESTARTING, "the gateway stops") for link in self._links]
        await asyncio.gather(*closing)

    async def _revoked(self, _: str, __: bytes) -> None:
        self._look.set()

    async def _node_changed(self, subject: str, payload: bytes) -> None:
        """The node has work, or, with a link's id, a newer link."""
        for link in self._links.of_node(subjects.last_token(subject)):
            link.wake()
            if payload and payload != link.key.link_id.encode():
                self._look.set()

    async def _look_around(self) -> None:
        """Look when told to, and every two seconds; a database that is away is asked again as soon."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_S):
                await self._look.wait()
        self._look.clear()
        try:
            await self._check_links()
        except AWAY as error:
            _log.warning("link_check_deferred", error=repr(error))

    async def _check_links(self) -> None:
        """Close what was revoked, has run out or was superseded; wake what has work that no hint told of."""
        await self.peers.check()
        links = list(self._links)
        if not links:
            return
        async with self._db.read() as conn:
            current = await link_rows.current(conn, [link.key for link in links])
            busy = await task_rows.nodes_with_work(conn, [link.key.node_id for link in links])
        old = [link for link in links if link.key.link_id not in current]
        await asyncio.gather(*(link.socket.close(Close.SUPERSEDED, "superseded by a newer link") for link in old))
        for link in links:
            if link.key.node_id in busy:
                link.wake()

    async def _listen(self) -> None:
        async with self._db.read() as conn:
            await link_rows.listen(conn)

    async def _keep_leases(self) -> None:
        before = {link.key.link_id: (link, set(link.owed)) for link in self._links if link.owed}
        if not before:
            return
        async with self._db.transaction() as tx:
            owed = await task_rows.renew_leases(tx, list(before), lease_s=self._config.task_lease_s)
        for link_id, (link, then) in before.items():
            for task_id in then - owed.get(link_id, set()):
                link.answered(task_id)

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        # The limit of aiohttp is the first size that it refuses.
        response = web.WebSocketResponse(
            max_msg_size=FRAME_BYTES_MAX + 1, heartbeat=_PING_S, compress=False, timeout=2.0
        )
        await response.prepare(request)
        socket = Socket(request, response)
        with correlated(new_id("cor")):
            try:
                await self._converse(request, response, socket)
            except Busy as busy:
                await socket.send(Refused(code="busy", detail=str(busy), retry_after_s=busy.retry_after_s))
                await self._refuse(socket, Close.BUSY, str(busy))
            except Refusal as refusal:
                await self._refuse(socket, refusal.code, refusal.reason)
            except frames.Malformed as error:
                await self._refuse(socket, Close.MALFORMED, str(error))
            except CertificateRefused as error:
                await self._refuse(socket, Close.UNAUTHENTICATED, error.detail)
            except AWAY as error:
                await self._refuse(socket, Close.RESTARTING, "try again", error=repr(error))
        return response

    async def _refuse(self, socket: Socket, code: Close, reason: str, **context: str) -> None:
        _log.info("link_closed", code=int(code), reason=reason, **context)
        await socket.close(code, reason)

    async def _converse(self, request: web.Request, response: web.WebSocketResponse, socket: Socket) -> None:
        peer = await self.peers.identify(request)
        hello = await self._greet(response, socket, peer)
        if hello is None:
            return
        admitted = await self._admission.admit(peer, hello)
        self._clock.set(admitted.at)
        link = Link(admitted.key, socket, self._courier.wake)
        self._links.add(link)

        async def cut(reason: str) -> None:
            await socket.close(Close.UNAUTHENTICATED, reason)

        try:
            with self.peers.hold(peer, cut):
                # The certificate may have been revoked, and the link superseded, since they were looked at.
                self._look.set()
                await socket.send(self._welcome(admitted.slots_approved))
                await self._receive(response, link)
        finally:
            await self._forget(link)

    async def _greet(self, response: web.WebSocketResponse, socket: Socket, peer: Peer) -> Hello | None:
        nonce = secrets.token_urlsafe(24)
        await socket.send(Challenge(nonce=nonce))
        data = await _next_frame(response, timeout_s=_HELLO_S)
        if data is None:
            return None
        try:
            hello = frames.decode_hello(data)
        except frames.UnsupportedVersion as error:
            raise Refusal(Close.UNSUPPORTED_VERSION, str(error)) from error
        if not hmac.compare_digest(hello.nonce.encode(), nonce.encode()):
            raise Refusal(Close.UNAUTHENTICATED, "the nonce is not this connection's")
        if hello.node_id != peer.node_id:
            raise Refusal(Close.IDENTITY_MISMATCH, "identity_mismatch: the certificate is another node's")
        return hello

    def _welcome(self, slots_approved: int) -> Welcome:
        return Welcome(
            gateway_id=self._gateway_id,
            server_time=self._clock.now(),
            heartbeat_s=self._config.heartbeat_s,
            slots_approved=slots_approved,
            spread_s=self._links.spread_s(self._config.accepts_per_s),
        )

    async def _receive(self, response: web.WebSocketResponse, link: Link) -> None:
        while (data := await _next_frame(response)) is not None:
            match frames.decode(data):
                case Ask(count=count):
                    link.ask(count)
                case Heartbeat() as heartbeat:
                    self._heartbeats.receive(link, heartbeat)
                case TaskResult() as result:
                    await self._commit(link, result)
                case SecretsAsk(task_id=task_id):
                    await self._give_secrets(link, task_id)
                case LogLines(lines=lines):
                    await self._on_logs(link.key.node_id, [_bounded(line) for line in lines])
                case Hello():
                    raise frames.Malformed("hello comes once")

    async def _commit(self, link: Link, result: TaskResult) -> None:
        async with self._db.transaction() as tx:
            verdict = await tasks.commit_result(tx, link.key.node_id, result, self._handoffs)
        link.answered(result.task_id)
        await link.socket.send(ResultAck(task_id=result.task_id, verdict=verdict))

    async def _give_secrets(self, link: Link, task_id: str) -> None:
        """The values, or a code; the agent knows which of them are worth asking again for."""
        try:
            async with self._db.transaction() as tx:
                values = await disclosure.answer(tx, link.key, task_id, self._secrets)
        except PenstockError as error:
            _log.warning(
                "values_withheld", node_id=link.key.node_id, task_id=task_id, code=error.code, detail=error.detail
            )
            await link.socket.send(SecretValues(task_id=task_id, error=error.code))
            return
        await link.socket.send(SecretValues(task_id=task_id, values=values))

    async def _forget(self, link: Link) -> None:
        self._links.remove(link)
        self._courier.forget(link)
        if not self._links.of_node(link.key.node_id):
            with suppress(KeyError):
                metrics.SKEW_S.remove(link.key.node_id)
        with suppress(*AWAY):
            async with self._db.read() as conn:
                await link_rows.remove(conn, link.key)

    async def _renew(self, request: web.Request) -> web.Response:
        try:
            peer = await self.peers.identify(request)
            body = await _read_body(request)
            wanted = await jsonbody.read(body, _renew_decoder)
            async with self._db.transaction() as tx:
                enrolled = await self._enrolment.renew(tx, peer.node_id, wanted.csr_pem)
        except PenstockError as error:
            return failure(error)
        return web.Response(body=msgspec.json.encode(enrolled), content_type="application/json")


async def _next_frame(response: web.WebSocketResponse, *, timeout_s: float | None = None) -> bytes | None:
    """The next frame, or none when the socket ended. Frames that are too big have closed it with 1009 already."""
    try:
        message = await response.receive(timeout=timeout_s)
    except TimeoutError as error:
        raise frames.Malformed(f"no hello within {timeout_s:g} s") from error
    if message.type is WSMsgType.TEXT:
        raise frames.Malformed("frames are binary msgpack")
    return message.data if message.type is WSMsgType.BINARY else None


async def _read_body(request: web.Request) -> bytes:
    body = await request.content.read(_RENEW_BYTES_MAX + 1)
    while not request.content.at_eof() and len(body) <= _RENEW_BYTES_MAX:
        body += await request.content.read(_RENEW_BYTES_MAX + 1 - len(body))
    return body[:_RENEW_BYTES_MAX]


def failure(error: PenstockError) -> web.Response:
    """The usual envelope."""
    detail = ErrorDetail(code=error.code, message=error.detail, field=error.field, correlation_id=correlation_id())
    return web.Response(
        status=STATUS[error.kind],
        body=msgspec.json.encode(ErrorBody(error=detail)),
        content_type="application/json",
    )


def _bounded(line: LogLine) -> LogLine:
    """Agents split long lines; what is too long all the same is cut."""
    if len(line.text) <= LOG_LINE_BYTES_MAX:
        return line
    return msgspec.structs.replace(line, text=line.text[:LOG_LINE_BYTES_MAX], split=True)

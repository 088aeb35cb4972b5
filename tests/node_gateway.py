"""A gateway small enough to hold in one's head: a CA, enrolment, and the link's other end, for the node's tests."""

import asyncio
import base64
import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import WSMsgType, web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from penstock.kit.ids import new_id
from penstock.wire.link import (
    Ask,
    Challenge,
    FromAgent,
    Heartbeat,
    HeartbeatAck,
    Hello,
    LogLine,
    LogLines,
    ResultAck,
    ResultVerdict,
    TaskResult,
    Tasks,
    Welcome,
)
from penstock.wire.rest import Enrolled, EnrolRequest, RenewRequest
from penstock.wire.tasks import SignedTask, TaskBody

NODE_ID = "nod_00000000000000000000000001"
_decoder = msgspec.msgpack.Decoder(FromAgent)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class Authority:
    """A CA of the test's own."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._sign(_name("test ca"), self.key.public_key(), (), ca=True, life_s=3600)

    @property
    def pem(self) -> str:
        """Its certificate."""
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()

    def _sign(
        self, subject: x509.Name, key: Any, uris: tuple[str, ...], *, ca: bool, life_s: float
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(_name("test ca"))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(seconds=1))
            .not_valid_after(now + timedelta(seconds=life_s))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if uris:
            names = [x509.UniformResourceIdentifier(uri) for uri in uris]
            addresses = [x509.IPAddress(ip_address("127.0.0.1"))]
            builder = builder.add_extension(x509.SubjectAlternativeName([*names, *addresses]), critical=False)
        return builder.sign(self.key, hashes.SHA256())

    def issue(self, csr_pem: str, uri: str, *, life_s: float = 3600) -> str:
        """A certificate for a request."""
        csr = x509.load_pem_x509_csr(csr_pem.encode())
        made = self._sign(csr.subject, csr.public_key(), (uri,), ca=False, life_s=life_s)
        return made.public_bytes(serialization.Encoding.PEM).decode()

    def server_pem(self, folder: Path, uri: str) -> Path:
        """Key and certificate of a server with this name."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = self._sign(_name("server"), key.public_key(), (uri,), ca=False, life_s=3600)
        path = folder / f"server-{new_id('tst')}.pem"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + made.public_bytes(serialization.Encoding.PEM)
        )
        return path


class Gateway:
    """Enrols one node and talks with it. What the agent sent is in `results`, `heartbeats`, `lines`, `hellos`."""

    def __init__(self, folder: Path, *, uri: str = "penstock://gateway") -> None:
        self.authority = Authority()
        self.signer = Ed25519PrivateKey.generate()
        #: Nothing must depend on the host's own clock.
        self.clock_skew = timedelta(days=1700)
        self.results: asyncio.Queue[TaskResult] = asyncio.Queue()
        self.heartbeats: asyncio.Queue[Heartbeat] = asyncio.Queue()
        self.hellos: asyncio.Queue[Hello] = asyncio.Queue()
        self.lines: list[LogLine] = []
        self.serials: list[str] = []
        self.acknowledge = True
        self.certificate_life_s = 3600.0
        self.heartbeat_s = 0.5
        self.asked = asyncio.Event()
        self._server_pem = self.authority.server_pem(folder, uri)
        self._folder = folder
        self._socket: web.WebSocketResponse | None = None
        self._runner: web.AppRunner | None = None
        self.api_url = ""
        self.link_url = ""

    @property
    def server_time(self) -> datetime:
        """The gateway's clock."""
        return datetime.now(UTC) + self.clock_skew

    async def start(self) -> None:
        """Listen: the api without TLS, the link with mTLS."""
        app = web.Application()
        app.router.add_post("/api/v1/enrolments", self._enrol)
        app.router.add_post("/renew", self._renew)
        app.router.add_get("/link", self._link)
        app.router.add_get("/tunnel", self._tunnel)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        plain = web.TCPSite(self._runner, "127.0.0.1", 0)
        await plain.start()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._server_pem)
        context.load_verify_locations(cadata=self.authority.pem)
        context.verify_mode = ssl.CERT_REQUIRED
        secure = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context)
        await secure.start()
        ports = [site._server.sockets[0].getsockname()[1] for site in (plain, secure)]
        self.api_url = f"http://127.0.0.1:{ports[0]}"
        self.link_url = f"wss://127.0.0.1:{ports[1]}"

    async def stop(self) -> None:
        """End."""
        if self._socket is not None:
            await self._socket.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def _enrolled(self, csr_pem: str) -> Enrolled:
        issued = self.authority.issue(csr_pem, f"penstock://node/{NODE_ID}", life_s=self.certificate_life_s)
        raw = self.signer.public_key().public_bytes_raw()
        return Enrolled(
            node_id=NODE_ID,
            certificate_pem=issued,
            ca_pem=self.authority.pem,
            task_keys={"k1": base64.b64encode(raw).decode()},
            link_url=self.link_url,
        )

    async def _enrol(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=EnrolRequest)
        if asked.token != "good":
            return web.Response(status=401, body=b'{"error": {"code": "unauthenticated"}}')
        return web.Response(status=201, body=msgspec.json.encode(self._enrolled(asked.csr_pem)))

    async def _renew(self, request: web.Request) -> web.Response:
        assert request.get_extra_info("peercert")
        asked = msgspec.json.decode(await request.read(), type=RenewRequest)
        return web.Response(body=msgspec.json.encode(self._enrolled(asked.csr_pem)))

    async def _tunnel(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for _ in socket:
            pass
        return socket

    async def _link(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=4 << 20)
        await socket.prepare(request)
        self.serials.append(request.get_extra_info("peercert")["serialNumber"])
        await _send(socket, Challenge(nonce="once"))
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                await self._take(socket, _decoder.decode(message.data))
        return socket

    async def _take(self, socket: web.WebSocketResponse, frame: object) -> None:
        match frame:
            case Hello():
                self._socket = socket
                await _send(socket, self._welcome())
                self.hellos.put_nowait(frame)
            case Ask():
                self.asked.set()
            case Heartbeat():
                self.heartbeats.put_nowait(frame)
                await _send(socket, HeartbeatAck(server_time=self.server_time))
            case TaskResult():
                self.results.put_nowait(frame)
                if self.acknowledge:
                    await _send(socket, ResultAck(task_id=frame.task_id, verdict=ResultVerdict.APPLIED))
            case LogLines():
                self.lines += frame.lines
            case _:
                raise AssertionError(frame)

    def _welcome(self) -> Welcome:
        return Welcome(
            gateway_id="gtw_test", server_time=self.server_time, heartbeat_s=self.heartbeat_s, slots_approved=64
        )

    def task(self, kind: str, params: msgspec.Struct | None = None, **changes: Any) -> SignedTask:
        """A good task, but for the changes."""
        raw = msgspec.msgpack.encode(params) if params is not None else b"\x80"
        values: dict[str, Any] = {
            "task_id": new_id("tsk"),
            "node_id": NODE_ID,
            "allocation_id": None,
            "fence": 1,
            "expires_at": self.server_time + timedelta(seconds=60),
            "correlation_id": "cor_test",
        }
        body = msgspec.msgpack.encode(TaskBody(type=kind, params=msgspec.Raw(raw), **(values | changes)))
        return SignedTask(body=body, key_id="k1", signature=self.signer.sign(body))

    async def send(self, *tasks: SignedTask) -> None:
        """To the node, as soon as its link stands."""
        await asyncio.wait_for(self.asked.wait(), 20)
        assert self._socket is not None
        await _send(self._socket, Tasks(tasks=list(tasks)))

    async def ask(self, *tasks: SignedTask, timeout: float = 20) -> list[TaskResult]:
        """Send tasks and wait for as many results."""
        await self.send(*tasks)
        return [await asyncio.wait_for(self.results.get(), timeout) for _ in tasks]

    async def cut(self) -> None:
        """End the link without a word."""
        self.asked.clear()
        if self._socket is not None:
            await self._socket.close()


async def _send(socket: web.WebSocketResponse, frame: msgspec.Struct) -> None:
    await socket.send_bytes(msgspec.msgpack.encode(frame))

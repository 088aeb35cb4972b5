"""The node's end of a link, just enough of it to be good or bad on purpose."""

import asyncio
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from penstock.fleet import pki
from penstock.kit.clock import utc_now
from penstock.wire.link import (
    Ask,
    Challenge,
    FromGateway,
    GpuReport,
    Heartbeat,
    Hello,
    ResultAck,
    TaskResult,
    Tasks,
    UnitReport,
    Welcome,
)
from penstock.wire.rest import Enrolled
from penstock.wire.tasks import Gpu, Inventory, Outcome, TaskBody

T = TypeVar("T", bound=msgspec.Struct)
_decoder = msgspec.msgpack.Decoder(FromGateway)


def new_key() -> ec.EllipticCurvePrivateKey:
    """A node's key."""
    return ec.generate_private_key(ec.SECP256R1())


def request_for(key: ec.EllipticCurvePrivateKey, name: str) -> str:
    """A signing request in PEM."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM).decode()


def inventory(count: int, *, first: int = 0) -> Inventory:
    """Simulated GPUs."""
    gpus = [
        Gpu(uuid=f"GPU-{index}", index=index, model="Simulated 80G", memory_bytes=80 << 30)
        for index in range(first, first + count)
    ]
    return Inventory(gpus=gpus, simulated=True)


class Closed(Exception):
    """The gateway closed the link."""

    def __init__(self, code: int | None, reason: str) -> None:
        super().__init__(f"{code} {reason}")
        self.code = code
        self.reason = reason


@dataclass
class Agent:
    """One connection."""

    socket: aiohttp.ClientWebSocketResponse
    node_id: str
    nonce: str
    taken: list[str] = field(default_factory=list)

    @staticmethod
    def save(folder: Path, name: str, enrolled: Enrolled, key: ec.EllipticCurvePrivateKey) -> None:
        """Keep a node's identity in files."""
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (folder / f"{name}.key").write_bytes(pem)
        (folder / f"{name}.crt").write_text(enrolled.certificate_pem)
        (folder / f"{name}.ca").write_text(enrolled.ca_pem)
        (folder / f"{name}.id").write_text(enrolled.node_id)

    @staticmethod
    def tls(folder: Path, name: str) -> ssl.SSLContext:
        """A node's side of TLS."""
        return pki.client_context(folder / f"{name}.ca", folder / f"{name}.crt", folder / f"{name}.key")

    @classmethod
    async def dial(cls, session: aiohttp.ClientSession, url: str, folder: Path, name: str) -> "Agent":
        """Connect and take the challenge."""
        socket = await session.ws_connect(f"{url}/link", ssl=cls.tls(folder, name), max_msg_size=1 << 24)
        agent = cls(socket, (folder / f"{name}.id").read_text(), "")
        agent.nonce = (await agent.expect(Challenge)).nonce
        return agent

    async def send(self, frame: msgspec.Struct) -> None:
        """One frame."""
        await self.socket.send_bytes(msgspec.msgpack.encode(frame))

    async def receive(self, *, timeout: float = 5) -> FromGateway:
        """The next frame, or Closed."""
        message = await self.socket.receive(timeout=timeout)
        if message.type is aiohttp.WSMsgType.CLOSE:
            raise Closed(message.data, message.extra or "")
        if message.type is not aiohttp.WSMsgType.BINARY:
            raise Closed(self.socket.close_code, repr(message.data))
        return _decoder.decode(message.data)

    async def expect(self, kind: type[T], *, timeout: float = 5) -> T:
        """The next frame of this kind; others are passed over."""
        async with asyncio.timeout(timeout):
            while True:
                frame = await self.receive(timeout=timeout)
                if isinstance(frame, kind):
                    return frame

    async def closed(self, *, timeout: float = 6) -> Closed:
        """How the gateway ended the link."""
        try:
            async with asyncio.timeout(timeout):
                while True:
                    await self.receive(timeout=timeout)
        except Closed as closed:
            return closed

    def hello(self, gpus: int = 2, **changed: object) -> Hello:
        """A proper hello."""
        proper = Hello(
            protocol_version=1,
            node_id=self.node_id,
            nonce=self.nonce,
            agent_version="0.1.0",
            boot_id="boot-1",
            inventory=inventory(gpus),
            production=False,
        )
        return msgspec.structs.replace(proper, **changed)

    async def join(self, gpus: int = 2, *, ask: int = 8) -> Welcome:
        """Hello, welcome, and ready for tasks."""
        await self.send(self.hello(gpus))
        welcome = await self.expect(Welcome)
        await self.send(Ask(count=ask))
        return welcome

    async def beat(
        self,
        units: list[UnitReport] | None = None,
        gpus: list[GpuReport] | None = None,
        *,
        ahead_s: float = 0,
        serves_functions: bool = False,
        trouble: str = "",
    ) -> None:
        """A heartbeat, by a clock that may be wrong."""
        from datetime import timedelta

        at = utc_now() + timedelta(seconds=ahead_s)
        await self.send(
            Heartbeat(
                sent_at=at,
                units=units or [],
                gpus=gpus or [],
                serves_functions=serves_functions,
                trouble=trouble,
            )
        )

    async def task(self, *, timeout: float = 5) -> TaskBody:
        """The next single task."""
        tasks = await self.expect(Tasks, timeout=timeout)
        assert len(tasks.tasks) == 1
        return msgspec.msgpack.decode(tasks.tasks[0].body, type=TaskBody)

    async def next_task_id(self) -> str:
        """The next task, however they are batched."""
        if not self.taken:
            frame = await self.expect(Tasks)
            self.taken += [msgspec.msgpack.decode(task.body, type=TaskBody).task_id for task in frame.tasks]
        return self.taken.pop(0)

    async def answer(
        self, task_id: str, fence: int, answer: msgspec.Struct | None = None, outcome: Outcome = Outcome.SUCCEEDED
    ) -> ResultAck:
        """Report a result and wait for its verdict."""
        raw = msgspec.Raw(msgspec.msgpack.encode(answer))
        await self.send(TaskResult(task_id=task_id, fence=fence, outcome=outcome, answer=raw))
        return await self.expect(ResultAck)

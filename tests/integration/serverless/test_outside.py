"""The listener of the embedded NATS for sidecars of other hosts: TLS alone, and nobody but workers."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from integration.serverless.sidecars import Worker, fresh_streams, make_worker
from penstock.embedded import nats
from penstock.embedded.nats import Outside
from penstock.embedded.ports import free_port, listening
from penstock.fleet import pki
from penstock.kit.bus import Bus, connect
from penstock.kit.db import Database
from penstock.kit.pull import Pull
from penstock.serverless import callout, streams
from penstock.serverless.callout import Callout
from penstock.wire import subjects

# nats-py names its WebSocket's time-out in the old way of aiohttp.
pytestmark = pytest.mark.filterwarnings("ignore:parameter 'timeout' of type 'float':DeprecationWarning")
HOST = "127.0.0.2"


@dataclass(frozen=True)
class Stage:
    """A server with both listeners, and somebody who says who sidecars are."""

    bus: Bus
    inside: str
    port: int
    tls: ssl.SSLContext
    worker: Worker

    @property
    def outside(self) -> str:
        """The address that nodes are told."""
        return f"wss://{HOST}:{self.port}"


@pytest.fixture
async def stage(tmp_path: Path, database: Database) -> AsyncIterator[Stage]:
    """Both listeners, on a server of the test's own."""
    pki.init(tmp_path / "pki", ["127.0.0.1", HOST, "localhost"])
    crt, key = tmp_path / "pki" / "gateway.crt", tmp_path / "pki" / "gateway.key"
    outside = Outside(host=HOST, port=free_port(), certificate=crt, key=key)
    tls = ssl.create_default_context(cafile=str(tmp_path / "pki" / "ca.crt"))
    async with (
        nats.run(tmp_path / "nats", free_port(), tmp_path / "log", outside) as (url, _),
        connect(url, name="test") as bus,
    ):
        await fresh_streams(bus)
        await Callout(database, bus, nats.issuer_seed(tmp_path / "nats").read_text()).serve()
        worker = await make_worker(database, bus, "first", 1)
        yield Stage(bus, url, outside.port, tls, worker)


async def _answer(stage: Stage, user: str, password: str) -> str:
    """What the server says at the network's door to this user, before it hangs up."""
    said = b""
    async with (
        asyncio.timeout(20),
        aiohttp.ClientSession() as session,
        session.ws_connect(stage.outside, ssl=stage.tls) as socket,
    ):
        options = {"user": user, "pass": password, "verbose": False, "pedantic": False, "lang": "test"}
        await socket.send_bytes(f"CONNECT {json.dumps(options)}\r\nPING\r\n".encode())
        async for message in socket:
            said += message.data
            if b"PONG" in said:
                break
    return said.decode().partition("\r\n")[2].strip()


async def test_a_worker_elsewhere_takes_its_attempt_and_comes_back_when_its_identity_ends(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callout, "LIFE_S", 1)
    worker = stage.worker
    prefix = subjects.worker_inbox(worker.name)
    async with (
        asyncio.timeout(60),
        connect(
            stage.outside, name="s", user=worker.name, password=worker.token, inbox_prefix=prefix, tls=stage.tls
        ) as own,
        Pull(own, stream=streams.WORK, consumer=worker.name, batch=4) as pull,
    ):
        while own.client.stats["reconnects"] < 1:
            await asyncio.sleep(0.02)
        await stage.bus.publish(subjects.dispatch(worker.request, worker.name), b"attempt", msg_id="d1")
        (message,) = await pull.take(10)
        assert message.data == b"attempt"
        stored = await own.publish(subjects.result(worker.request), b"result", msg_id="r1")
    assert (await stage.bus.js.get_msg(streams.OUT, stored.seq)).data == b"result"


async def test_only_workers_come_in_from_the_network(stage: Stage) -> None:
    ours = urlsplit(stage.inside)
    for user, password in (
        ("", ""),
        ("nobody", stage.worker.token),
        (stage.worker.name, "wrong"),
        (nats.USER, "wrong"),
        # Our own user is for loopback: its password, once lost, opens nothing from elsewhere.
        (nats.USER, ours.password or ""),
    ):
        assert await _answer(stage, user, password) == "-ERR 'Authorization Violation'", user
    assert await _answer(stage, stage.worker.name, stage.worker.token) == "PONG"


async def test_the_network_is_not_spoken_to_without_tls(stage: Stage) -> None:
    ours = urlsplit(stage.inside)
    assert ours.port is not None
    assert not listening(ours.port, HOST), "the plain listener is on loopback alone"
    for greeting in (b"CONNECT {}\r\nPING\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n\r\n"):
        reader, writer = await asyncio.open_connection(HOST, stage.port)
        async with asyncio.timeout(20):
            writer.write(greeting)
            answer = await reader.read()
        writer.close()
        assert b"INFO" not in answer
        assert b"101" not in answer


async def test_another_authority_is_not_believed(stage: Stage) -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await session.ws_connect(stage.outside, ssl=ssl.create_default_context())


@pytest.mark.parametrize(("info", "sent"), [({}, b""), ({"tls_available": True}, b"\x16")])
async def test_an_address_with_tls_sends_nothing_in_plain_text(info: dict[str, bool], sent: bytes) -> None:
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"INFO {json.dumps({'max_payload': 1024, **info})}\r\n".encode())
        first = await reader.read(1)
        if not heard.done():
            heard.set_result(first)
        writer.close()

    async def dial(port: int) -> None:
        async with connect(f"tls://127.0.0.1:{port}", name="s", user="w", password="secret"):
            pass

    async with await asyncio.start_server(serve, "127.0.0.1", free_port()) as server:
        dialling = asyncio.create_task(dial(server.sockets[0].getsockname()[1]))
        async with asyncio.timeout(20):
            assert await heard == sent
        while not dialling.done():
            # `wait_for` loses a cancellation that comes together with the end of what it waits for.
            dialling.cancel()
            await asyncio.wait({dialling}, timeout=0.1)

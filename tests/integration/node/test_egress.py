"""The proxy out of a unit, with real sockets on both sides; only the lookup and what counts as public are played."""

import asyncio
import errno
import ipaddress
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from node_host import Host, request, tenant_folder
from penstock.kit.addresses import is_elsewhere
from penstock.kit.ids import new_id
from penstock.node.egress import CONNECTIONS_MAX, Proxy
from penstock.wire.egress import Address, is_public, parse
from penstock.wire.tasks import UnitHandoff

LOOPBACK = ipaddress.ip_address("127.0.0.1")


class Names:
    """A name service that answers something else each time, and counts."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[Address]:
        self.asked.append(host)
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if not found:
            raise OSError("no such name")
        return [ipaddress.ip_address(text) for text in found]


@asynccontextmanager
async def server(answer: bytes) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Answers each connection once its request's head has come; what it was sent."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield listener.sockets[0].getsockname()[1], seen


async def ask(proxy: Proxy, *pieces: bytes) -> bytes:
    """Send through the proxy as a unit would, and read to the end."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    proxy.accept(theirs)
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        for piece in pieces:
            writer.write(piece)
        async with asyncio.timeout(30):
            return await reader.read()
    finally:
        writer.close()


def proxy(names: Names, *rules: str) -> Proxy:
    return Proxy(
        "alc_test",
        [parse(rule) for rule in rules],
        resolve=names,
        permitted=lambda address: address == LOOPBACK or is_public(address),
    )


async def test_a_tunnel_to_an_allowed_host_carries_both_ways() -> None:
    names = Names(["127.0.0.1"])
    async with server(b"HTTP/1.1 200 OK\r\n\r\nthrough") as (port, seen):
        out = await ask(
            proxy(names, f"good.example:{port}"),
            f"CONNECT good.example:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
            b"GET / HTTP/1.1\r\n\r\n",
        )
    assert out == b"HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK\r\n\r\nthrough"
    assert seen == [b"GET / HTTP/1.1\r\n\r\n"]
    assert names.asked == ["good.example"]


async def test_a_plain_request_is_passed_on_as_its_server_expects_it() -> None:
    async with server(b"HTTP/1.1 204 No Content\r\n\r\n") as (port, seen):
        out = await ask(
            proxy(Names(["127.0.0.1"]), f"good.example:{port}"),
            f"GET http://good.example:{port}/a?b=c HTTP/1.1\r\nHost: other\r\n".encode(),
            b"Proxy-Authorization: s\r\nX: 1\r\n\r\n",
        )
    assert out.startswith(b"HTTP/1.1 204")
    assert seen == [f"GET /a?b=c HTTP/1.1\r\nHost: good.example:{port}\r\nX: 1\r\nConnection: close\r\n\r\n".encode()]


@pytest.mark.parametrize(
    "request_line",
    [
        "CONNECT other.example:443 HTTP/1.1",
        "CONNECT good.example:22 HTTP/1.1",
        "GET http://good.example/ HTTP/1.1",
    ],
)
async def test_what_is_not_on_the_list_is_refused_without_a_lookup(request_line: str) -> None:
    names = Names(["127.0.0.1"])
    out = await ask(proxy(names, "good.example:443"), f"{request_line}\r\n\r\n".encode())
    assert out.startswith(b"HTTP/1.1 403 ")
    assert b"egress list" in out
    assert names.asked == []


@pytest.mark.parametrize("address", ["10.0.0.1", "169.254.169.254", "::1", "fd00:ec2::254", "::ffff:192.168.0.1"])
async def test_a_name_that_leads_to_a_private_address_is_refused(address: str) -> None:
    for answers in ([address], ["8.8.8.8", address]):
        out = await ask(proxy(Names(answers), "*:*"), b"CONNECT sneaky.example:443 HTTP/1.1\r\n\r\n")
        assert out.startswith(b"HTTP/1.1 403 ")
        assert b"not a public address" in out


@pytest.mark.parametrize("host", ["10.0.0.1", "169.254.169.254", "[::1]", "[::ffff:10.0.0.1]"])
async def test_a_private_address_is_refused_even_when_everything_is_allowed(host: str) -> None:
    out = await ask(proxy(Names([]), "*:*"), f"CONNECT {host}:80 HTTP/1.1\r\n\r\n".encode())
    assert out.startswith(b"HTTP/1.1 403 ")


async def test_a_name_is_looked_up_once_and_that_answer_is_used() -> None:
    names = Names(["127.0.0.1"], ["10.0.0.1"])
    async with server(b"ok") as (port, _):
        out = await ask(
            proxy(names, "rebinding.example:*"),
            f"CONNECT rebinding.example:{port} HTTP/1.1\r\n\r\n".encode(),
            b"x\r\n\r\n",
        )
    assert out.endswith(b"ok")
    assert names.asked == ["rebinding.example"]


@pytest.mark.parametrize(
    "head",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"CONNECT good.example HTTP/1.1\r\n\r\n",
        b"CONNECT user@good.example:443 HTTP/1.1\r\n\r\n",
        b"CONNECT good.example:99999 HTTP/1.1\r\n\r\n",
        b"CONNECT evil.example\0.good.example:443 HTTP/1.1\r\n\r\n",
        b"CONNECT [2606:4700::1%.good.example]:443 HTTP/1.1\r\n\r\n",
        b"CONNECT evil.example\\.good.example:443 HTTP/1.1\r\n\r\n",
        b"GET http:///x HTTP/1.1\r\n\r\n",
        b"GET http://good.example/ HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET http://good.example/ HTTP/1.1\r\nA : b\r\n\r\n",
        b"GET http://good.example/ HTTP/1.1\r\nA: " + b"x" * 40_000 + b"\r\n\r\n",
    ],
)
async def test_rubbish_is_refused(head: bytes) -> None:
    assert (await ask(proxy(Names(["127.0.0.1"]), "*:*"), head)).startswith(b"HTTP/1.1 400 ")


def test_this_host_is_refused_by_any_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.wire.egress.is_public", lambda _: True)
    assert not is_elsewhere(LOOPBACK)
    assert not is_elsewhere(ipaddress.ip_address("127.7.7.7"))
    assert is_elsewhere(ipaddress.ip_address("192.0.2.1"))


async def test_a_long_download_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.node.egress._IDLE_S", 2.0)

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(30):
            writer.write(b".")
            await asyncio.sleep(0.1)
        writer.close()

    listener = await asyncio.start_server(trickle, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        out = await ask(
            proxy(Names(["127.0.0.1"]), "good.example:*"), f"CONNECT good.example:{port} HTTP/1.1\r\n\r\n".encode()
        )
    assert out.endswith(b"." * 30)


async def test_an_idle_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.node.egress._IDLE_S", 0.2)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        out = await ask(
            proxy(Names(["127.0.0.1"]), "good.example:*"), f"CONNECT good.example:{port} HTTP/1.1\r\n\r\n".encode()
        )
    assert out == b"HTTP/1.1 200 Connection established\r\n\r\n"


async def test_a_name_that_does_not_exist_is_said_to_be_unknown() -> None:
    out = await ask(proxy(Names([]), "*"), b"CONNECT nobody.example:443 HTTP/1.1\r\n\r\n")
    assert out.startswith(b"HTTP/1.1 502 ")


async def test_connections_are_bounded_and_end_with_the_unit() -> None:
    busy = proxy(Names(["127.0.0.1"]), "*")
    pairs = [socket.socketpair() for _ in range(CONNECTIONS_MAX + 1)]
    try:
        for _, theirs in pairs:
            theirs.setblocking(False)
            busy.accept(theirs)
        extra = pairs[-1][0]
        extra.settimeout(5)
        assert await asyncio.to_thread(extra.recv, 1) == b""
        busy.close()
        first = pairs[0][0]
        first.settimeout(5)
        assert await asyncio.to_thread(first.recv, 1) == b""
    finally:
        for ours, _ in pairs:
            ours.close()


@asynccontextmanager
async def unit_of(node_folder: Path, *, stock: bool) -> AsyncIterator[tuple[Host, str]]:
    """A unit that may connect to one name, from its start or by its handoff."""
    host = Host.open(node_folder, tenant_folder())
    unit_id = new_id("alc")
    rules = ["good.example:*", "bad.example:*"]
    try:
        if stock:
            await host.units.start(request(unit_id, stock=True))
            handoff = UnitHandoff(unit_id=unit_id, allocation_id=new_id("alc"), egress=rules)
            await host.units.handoff(handoff)
        else:
            await host.units.start(request(unit_id, egress=rules))
        names = {"good.example": "127.0.0.1", "bad.example": "169.254.169.254"}

        async def resolve(name: str, port: int) -> Sequence[Address]:
            return [ipaddress.ip_address(names[name])]

        host.units._units[unit_id].proxy = Proxy(
            unit_id,
            [parse(rule) for rule in rules],
            resolve=resolve,
            permitted=lambda address: address == LOOPBACK or is_public(address),
        )
        yield host, unit_id
    finally:
        await host.units.stop_all(0)
        await host.close()


_FETCH = (
    "import sys, urllib.request, urllib.error\n"
    "try: print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())\n"
    "except urllib.error.HTTPError as e: print(e.code, e.read().decode().strip())\n"
)


@pytest.mark.parametrize("stock", [False, True])
async def test_a_unit_gets_out_by_its_proxy_and_only_where_it_may(node_folder: Path, stock: bool) -> None:
    async with (
        server(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nseen") as (port, seen),
        unit_of(node_folder, stock=stock) as (host, unit_id),
    ):
        fetched = await host.run(unit_id, "python3", "-c", _FETCH, f"http://good.example:{port}/x")
        assert fetched.out == "seen\n"
        assert seen[0].startswith(b"GET /x HTTP/1.1\r\nHost: good.example")
        other = await host.run(unit_id, "python3", "-c", _FETCH, f"http://other.example:{port}/")
        assert other.out.startswith("403 ")
        metadata = await host.run(unit_id, "python3", "-c", _FETCH, "http://bad.example/latest/meta-data")
        assert metadata.out == "403 bad.example is not a public address\n"
        direct = await host.run(
            unit_id,
            "python3",
            "-c",
            f"import socket; s = socket.socket(); s.settimeout(3); print(s.connect_ex(('127.0.0.1', {port})))",
        )
        assert direct.out == f"{errno.ECONNREFUSED}\n"


async def test_without_rules_there_is_no_proxy(node_folder: Path) -> None:
    host = Host.open(node_folder, tenant_folder())
    try:
        unit_id = await host.start()
        found = await host.run(unit_id, "sh", "-c", "echo [$HTTPS_PROXY$https_proxy$PENSTOCK_EGRESS]")
        assert found.out == "[]\n"
        code = "import socket; print(socket.socket().connect_ex(('127.0.0.1', 3128)))"
        assert (await host.run(unit_id, "python3", "-c", code)).out == f"{errno.ECONNREFUSED}\n"
    finally:
        await host.units.stop_all(0)
        await host.close()

"""The process itself: how it starts, stops, dies, and speaks TLS."""

import asyncio
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.embedded.child import free_port
from penstock.fleet import pki
from penstock.identity.bootstrap import bootstrap, reset_admin_key
from penstock.kit.db import Database
from penstock.secrets import keyring
from waiting import attempts

from .conftest import Api

CODE = "from penstock.processes.api import main; main()"


class Running:
    """One api process of a test's own."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.log = log

    async def ready(self, scheme: str = "http", context: ssl.SSLContext | bool = True) -> None:
        async with aiohttp.ClientSession() as session:
            async for _ in attempts():
                assert self.process.returncode is None, self.log.read_text()
                try:
                    async with session.get(f"{scheme}://127.0.0.1:{self.port}/readyz", ssl=context) as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    continue
        raise AssertionError(self.log.read_text())


@pytest.fixture
async def start(servers: Any, database_url: str, tmp_path: Path) -> AsyncIterator[Any]:
    """Start an api with these settings over the usual ones."""
    pki.init(tmp_path / "pki", ["127.0.0.1"])
    keyring.init(tmp_path / "secrets")
    started: list[Running] = []

    async def start_one(**changed: str) -> Running:
        port = int(changed.pop("PENSTOCK_API_PORT", free_port()))
        environment = {
            **os.environ,
            "PENSTOCK_DATABASE_URL": database_url,
            "PENSTOCK_NATS_URL": servers.nats_url,
            "PENSTOCK_PKI_DIR": str(tmp_path / "pki"),
            "PENSTOCK_SECRETS_DIR": str(tmp_path / "secrets"),
            "PENSTOCK_OBJECTS_URL": (tmp_path / "objects").as_uri(),
            "PENSTOCK_API_PORT": str(port),
            "PENSTOCK_API_OPS_PORT": "0",
            **changed,
        }
        log = tmp_path / f"{port}.log"
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", CODE, env=environment, stdout=output, stderr=output
            )
        started.append(Running(process, port, log))
        return started[-1]

    yield start_one
    for running in started:
        if running.process.returncode is None:
            running.process.kill()
            await running.process.wait()


async def key_of(database: Database) -> str:
    async with database.transaction() as tx:
        secret = await bootstrap(tx)
    assert secret is not None
    return secret


async def test_bootstrap_gives_the_key_once_and_reset_replaces_it(database: Database, start: Any) -> None:
    first = await key_of(database)
    async with database.transaction() as tx:
        assert await bootstrap(tx) is None
    running = await start()
    await running.ready()

    async def status(secret: str) -> int:
        headers = {"Authorization": f"Bearer {secret}"}
        url = f"http://127.0.0.1:{running.port}/api/v1/whoami"
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
            return response.status

    assert await status(first) == 200
    async with database.transaction() as tx:
        second = await reset_admin_key(tx)
    assert await status(second) == 200
    async for _ in attempts():
        if await status(first) == 401:
            break
    assert await status(first) == 401


async def test_sigterm_ends_open_streams_and_the_process(database: Database, start: Any) -> None:
    secret = await key_of(database)
    running = await start()
    await running.ready()
    url = f"http://127.0.0.1:{running.port}/api/v1/events/stream"
    headers = {"Authorization": f"Bearer {secret}"}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        assert await response.content.readline() == b": connected\n"
        started = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            while await response.content.readline():
                pass
            assert await running.process.wait() == 0
    assert time.monotonic() - started < 6


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_no_worker_outlives_the_first(number: int, start: Any) -> None:
    running = await start(PENSTOCK_API_WORKERS="3")
    await running.ready()
    children = _children(running.process.pid)
    assert len(children) == 2
    running.process.send_signal(number)
    await asyncio.wait_for(running.process.wait(), 30)
    async for _ in attempts():
        if not any(_alive(pid) for pid in children):
            break
    assert not any(_alive(pid) for pid in children)
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", running.port), 1):
        pass


async def test_all_workers_end_when_one_dies(start: Any) -> None:
    running = await start(PENSTOCK_API_WORKERS="2")
    await running.ready()
    (child,) = _children(running.process.pid)
    os.kill(child, signal.SIGKILL)
    assert await asyncio.wait_for(running.process.wait(), 30) != 0


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


async def test_a_port_in_use_is_said_in_words(api: Api, start: Any) -> None:
    running = await start(PENSTOCK_API_PORT=str(api.port))
    assert await asyncio.wait_for(running.process.wait(), 20) != 0
    assert "cannot listen on 127.0.0.1" in running.log.read_text()


async def test_tls_with_its_own_certificate(start: Any, tmp_path: Path) -> None:
    folder = tmp_path / "pki"
    running = await start(
        PENSTOCK_API_TLS_CERT=str(folder / "gateway.crt"), PENSTOCK_API_TLS_KEY=str(folder / "gateway.key")
    )
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    await running.ready("https", context)


async def test_a_header_line_ended_by_a_bare_line_feed_is_refused(api: Api) -> None:
    for line in (b"Host: a\nX-A: b\r\n", b"Host: a\r\nX-A: b\n"):
        received, closed = await api.raw(b"GET /healthz HTTP/1.1\r\n" + line + b"\r\n")
        assert received.startswith(b"HTTP/1.1 400 "), received
        assert b'"invalid_request"' in received
        assert closed


async def test_only_allowed_origins_get_cors_headers(start: Any) -> None:
    running = await start(PENSTOCK_ALLOWED_ORIGINS="https://console.example, https://other.example")
    await running.ready()
    url = f"http://127.0.0.1:{running.port}/api/v1/whoami"
    asked = {"Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "authorization"}
    async with aiohttp.ClientSession() as session:
        async with session.options(url, headers={"Origin": "https://console.example", **asked}) as response:
            assert response.headers["Access-Control-Allow-Origin"] == "https://console.example"
        async with session.options(url, headers={"Origin": "https://evil.example", **asked}) as response:
            assert "Access-Control-Allow-Origin" not in response.headers


async def test_health_and_metrics_on_the_ops_port(start: Any) -> None:
    ops_port = free_port()
    running = await start(PENSTOCK_API_OPS_PORT=str(ops_port))
    await running.ready()
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{ops_port}/healthz") as response:
            assert response.status == 200
        async with session.get(f"http://127.0.0.1:{ops_port}/metrics") as response:
            assert 'penstock_http_request_seconds_count{method="GET",status="200"}' in await response.text()


async def test_requests_do_not_share_their_context(api: Api) -> None:
    """Concurrent requests keep their own correlation ids."""
    ids = [f"ctx-{number}" for number in range(40)]
    answers = await asyncio.gather(
        *(api.call("GET", "/organisations", headers={"X-Correlation-Id": each}) for each in ids)
    )
    assert [answer.headers["x-correlation-id"] for answer in answers] == ids
    missing = await asyncio.gather(
        *(api.call("GET", f"/keys/{each}", headers={"X-Correlation-Id": each}) for each in ids)
    )
    assert [answer.error["correlation_id"] for answer in missing] == ids
    made_up = await api.call("GET", "/whoami", headers={"X-Correlation-Id": "bad id!" + "x" * 80})
    assert made_up.headers["x-correlation-id"].startswith("cor_")


async def test_the_reference_is_a_page_without_a_key(api: Api) -> None:
    async with api.session.get(f"http://127.0.0.1:{api.port}/docs") as answer:
        page = await answer.text()
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert 'id="createAllocation"' in page
    assert 'id="callFunction"' in page

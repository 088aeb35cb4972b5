"""Both clients send and fetch streams: rewound after a failure, resumed where they broke, checked at the end."""

import asyncio
import hashlib
import io
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web

import scripted_api
from penstock.sdk import asynchronous, errors, protocol
from penstock.sdk.client import AsyncClient, Client
from penstock.sdk.http1 import Http1
from penstock.sdk.link import Link
from penstock.sdk.protocol import Request
from penstock.sdk.target import Target
from penstock.sdk.transfers import Source, upload_headers
from scripted_api import ScriptedApi, error_answer, hang_up, json_answer

from .test_clients import ask  # noqa: F401 (a fixture)

BODY = os.urandom(600_000)
OBJECT = {
    "key": "k",
    "size": 3,
    "sha256": "0" * 64,
    "content_type": "text/plain",
    "created_at": "2026-01-01T00:00:00Z",
    "created_by": "usr_default",
}
Ask = Callable[..., Any]


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with scripted_api.serve() as running:
        yield running


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_BACKOFF_FIRST_S", 0.01)


def test_all_kinds_of_content_are_sent(api: ScriptedApi, ask: Ask, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "file").write_bytes(BODY)
    told: list[int] = []
    api.on("PUT", "/objects/a/%C3%A9", json_answer(OBJECT))
    api.on("PUT", "/objects/a/é", json_answer(OBJECT))
    for content in (BODY, tmp_path / "file", io.BytesIO(BODY)):
        made = ask(api.url, lambda client: client.objects.put("a/é", content, on_progress=told.append))  # noqa: B023
        assert made.key == "k"
    assert [seen.body == BODY for seen in api.seen] == [True] * 3
    assert told.count(len(BODY)) == 3


def test_an_empty_object_is_sent(api: ScriptedApi, ask: Ask) -> None:  # noqa: F811
    api.on("PUT", "/objects/k", json_answer(OBJECT))
    ask(api.url, lambda client: client.objects.put("k", b""))
    assert (api.seen[0].body, api.seen[0].headers["content-length"]) == (b"", "0")


def test_an_upload_is_sent_again_from_its_beginning(api: ScriptedApi, ask: Ask) -> None:  # noqa: F811
    api.on("PUT", "/objects/k", hang_up, error_answer(503, "unavailable", "later"), json_answer(OBJECT))
    file = io.BytesIO(b"before" + BODY)
    file.seek(6)
    ask(api.url, lambda client: client.objects.put("k", file))
    assert [seen.body == BODY for seen in api.seen] == [True] * 3


def test_what_cannot_be_rewound_is_sent_once(api: ScriptedApi, ask: Ask) -> None:  # noqa: F811
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

    api.on("PUT", "/objects/k", error_answer(503, "unavailable", "later"))
    with pytest.raises(errors.ServerError):
        ask(api.url, lambda client: client.objects.put("k", Pipe(BODY)))
    [seen] = api.seen
    assert (seen.body == BODY, seen.headers["transfer-encoding"]) == (True, "chunked")


@pytest.mark.parametrize("key", ["", "/a", "a/../b", "a//b", "k" * 1025, "\ud800"])
def test_a_bad_key_is_not_sent(api: ScriptedApi, ask: Ask, key: str) -> None:  # noqa: F811
    with pytest.raises(errors.InvalidArgument):
        ask(api.url, lambda client: client.objects.put(key, b"x"))
    assert api.seen == []


def serving(body: bytes, *, cut_at: int | None = None, etag: str = '"1"') -> scripted_api.Handler:
    """A server of objects with ranges, which hangs up after some bytes."""

    async def handle(request: web.Request) -> web.StreamResponse:
        first = 0
        if request.headers.get("If-Range") == etag:
            first = int(request.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        response = web.StreamResponse(status=206 if first else 200)
        response.headers["ETag"] = etag
        response.headers["Content-SHA256"] = hashlib.sha256(body).hexdigest()
        response.content_length = len(body) - first
        await response.prepare(request)
        await response.write(body[first:cut_at])
        if cut_at is not None:
            assert request.transport is not None
            request.transport.close()
        return response

    return handle


def test_a_download_is_whole_and_checked(api: ScriptedApi, ask: Ask) -> None:  # noqa: F811
    sizes: list[int] = []
    api.on("GET", "/objects/k", serving(BODY))
    assert b"".join(ask(api.url, lambda client: client.objects.get("k", on_size=sizes.append))) == BODY
    assert sizes == [len(BODY)]
    api.on("GET", "/objects/none", serving(b""))
    assert ask(api.url, lambda client: client.objects.get("none")) == []


def test_a_download_goes_on_where_it_broke(api: ScriptedApi, ask: Ask) -> None:  # noqa: F811
    api.on("GET", "/objects/k", serving(BODY, cut_at=100_000), serving(BODY, cut_at=400_000), serving(BODY))
    assert b"".join(ask(api.url, lambda client: client.objects.get("k"))) == BODY
    assert "range" not in api.seen[0].headers
    assert all("range" in seen.headers for seen in api.seen[1:])


def test_an_object_that_changed_meanwhile_is_not_mixed(api: ScriptedApi, ask: Ask) -> None:  # noqa: F811
    api.on("GET", "/objects/k", serving(BODY, cut_at=100_000), serving(b"other" * 1000, etag='"2"'))
    with pytest.raises(errors.BadAnswer, match="changed while it was read"):
        ask(api.url, lambda client: client.objects.get("k"))


def test_a_server_that_always_breaks_off_ends_it(api: ScriptedApi, ask: Ask) -> None:  # noqa: F811
    api.on("GET", "/objects/k", hang_up)
    with pytest.raises(errors.Unreachable):
        ask(api.url, lambda client: client.objects.get("k"))
    assert 2 <= len(api.seen) <= 8


def test_an_absent_object_is_not_found(api: ScriptedApi, ask: Ask) -> None:  # noqa: F811
    with pytest.raises(errors.NotFound):
        ask(api.url, lambda client: client.objects.get("k"))


class Stalled:
    """The link of a server that takes the head and then no more than so many pieces, and answers nothing."""

    def __init__(self, taken: int) -> None:
        self._left = taken

    async def send(self, _: bytes) -> None:
        self._left -= 1
        if self._left < 0:
            await asyncio.sleep(3600)

    async def receive(self) -> bytes:
        await asyncio.sleep(3600)
        return b""


@pytest.mark.parametrize("taken", [0, 1, 2, 3])
async def test_every_step_of_an_upload_has_its_time(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    """The head, a piece, the end, and the answer."""
    monkeypatch.setattr(asynchronous, "_SILENCE_S", 0.2)
    http = Http1(Target.of("http://127.0.0.1:1", "psk_k"))
    connection = asynchronous._Connection(cast("Link", Stalled(taken)), http)
    source = Source(io.BytesIO(b"abc"))
    request = Request(method="PUT", path="/x", headers=upload_headers(source, {}), body=source)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(20) as patience:
            await connection.ask(request, 0.2)
    assert not patience.expired()


class Unseekable(io.BytesIO):
    """What is sent once only."""

    def seekable(self) -> bool:
        return False


def put_blocking(url: str, content: Any) -> None:
    with Client(url, "psk_k", timeout_s=0.5) as client:
        client.objects.put("k", content)


def put_asynchronous(url: str, content: Any) -> None:
    async def put() -> None:
        async with AsyncClient(url, "psk_k", timeout_s=0.5) as client, asyncio.timeout(20):
            await client.objects.put("k", content)

    asyncio.run(put())


@pytest.mark.parametrize("put", [put_blocking, put_asynchronous])
def test_an_answer_to_an_upload_that_never_ends_is_given_up(put: Callable[[str, Any], None]) -> None:
    def serve_half(listener: socket.socket) -> None:
        taken, _ = listener.accept()
        with taken:
            taken.recv(65536)
            taken.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
            released.wait(60)

    released = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve_half, args=(listener,), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            with pytest.raises(errors.Unreachable):
                put(url, Unseekable(b"abc"))
        finally:
            released.set()

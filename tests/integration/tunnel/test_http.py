"""HTTP to a unit's port, from a client through a gateway and a node's tunnel."""

import asyncio
import gzip
import hashlib
import os
import resource
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from integration.tunnel.stage import World, error_of, send_raw


async def echo(request: web.BaseRequest) -> web.StreamResponse:
    """What the unit saw."""
    body = await request.read()
    return web.json_response(
        {
            "method": request.method,
            "target": request.raw_path,
            "headers": {name.lower(): value for name, value in request.headers.items()},
            "body": body.decode("latin-1"),
        }
    )


async def test_request_reaches_the_unit_and_the_answer_comes_back(world: World, http: aiohttp.ClientSession) -> None:
    async with world.serving(echo):
        url = URL(f"{world.base}/a//../b%20c?x=1&y=%2F", encoded=True)
        async with http.post(url, data=b"hello", headers=world.headers) as answer:
            seen = await answer.json()
            assert answer.status == 200
    assert seen["method"] == "POST"
    assert seen["target"] == "/a//../b%20c?x=1&y=%2F"
    assert seen["body"] == "hello"


async def test_methods_pass(world: World, http: aiohttp.ClientSession) -> None:
    async with world.serving(echo):
        for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND"):
            async with http.request(method, f"{world.base}/", headers=world.headers) as answer:
                assert (await answer.json())["method"] == method


async def test_credentials_and_forwarding_headers_are_ours(world: World, http: aiohttp.ClientSession) -> None:
    given = world.headers | {
        "Penstock-Project": "prj_default",
        "Cookie": "mine=1; penstock_session=secret; __Host-penstock=secret",
        "X-Forwarded-For": "6.6.6.6",
        "X-Forwarded-Host": "evil.example",
        "Connection": "keep-alive, X-Private",
        "X-Private": "hop",
        "X-Public": "end",
        "X-Correlation-Id": "abc-123",
    }
    async with world.serving(echo), http.get(f"{world.base}/", headers=given) as answer:
        seen = (await answer.json())["headers"]
        assert answer.headers["X-Correlation-Id"] == "abc-123"
    host = world.gateways[0].url.removeprefix("http://")
    assert world.key not in str(seen)
    assert not any(name.startswith("penstock") for name in seen)
    assert "authorization" not in seen
    assert "x-private" not in seen
    assert seen["cookie"] == "mine=1"
    assert seen["x-public"] == "end"
    assert seen["host"] == seen["x-forwarded-host"] == host
    assert seen["x-forwarded-for"] == "127.0.0.1"
    assert seen["x-forwarded-proto"] == "http"
    assert seen["x-forwarded-prefix"] == f"/u/{world.allocation_id}/8000"
    assert seen["x-correlation-id"] == "abc-123"


async def test_forwarding_headers_of_trusted_proxies_count(world: World, http: aiohttp.ClientSession) -> None:
    behind = await world.add_gateway(trusted_proxies="127.0.0.0/8", only="edge")
    given = world.headers | {"X-Forwarded-For": "9.9.9.9, 8.8.8.8", "X-Forwarded-Proto": "https"}
    async with world.serving(echo), http.get(f"{world.at(behind)}/", headers=given) as answer:
        seen = (await answer.json())["headers"]
    assert seen["x-forwarded-for"] == "8.8.8.8"
    assert seen["x-forwarded-proto"] == "https"


async def test_addresses_in_several_lines_are_one_list(world: World, http: aiohttp.ClientSession) -> None:
    behind = await world.add_gateway(trusted_proxies="127.0.0.0/8", only="edge")
    lines = [("X-Forwarded-For", "9.9.9.9"), ("X-Forwarded-For", "8.8.8.8"), ("X-Forwarded-For", "127.0.0.2")]
    given = [*world.headers.items(), *lines]
    async with world.serving(echo), http.get(f"{world.at(behind)}/", headers=given) as answer:
        assert (await answer.json())["headers"]["x-forwarded-for"] == "8.8.8.8"


async def test_key_as_password_of_basic_authentication(world: World, http: aiohttp.ClientSession) -> None:
    given = {"Authorization": aiohttp.encode_basic_auth("anybody", world.key)}
    async with world.serving(echo), http.get(f"{world.base}/", headers=given) as answer:
        assert answer.status == 200
        assert "authorization" not in (await answer.json())["headers"]


async def test_answer_headers_are_kept_to_the_unit(world: World, http: aiohttp.ClientSession) -> None:
    async def handler(request: web.BaseRequest) -> web.Response:
        response = web.Response(status=302, headers={"Location": "/login?a=1", "Clear-Site-Data": "*", "X-Own": "1"})
        response.headers.add("Set-Cookie", "sid=1; Domain=example.com; Path=/; HttpOnly")
        response.headers.add("Set-Cookie", "penstock_session=stolen; Path=/")
        return response

    async with (
        world.serving(handler),
        http.get(f"{world.base}/", headers=world.headers, allow_redirects=False) as answer,
    ):
        prefix = f"/u/{world.allocation_id}/8000"
        assert answer.status == 302
        assert answer.headers["Location"] == f"{prefix}/login?a=1"
        assert answer.headers.getall("Set-Cookie") == [f"sid=1; HttpOnly; Path={prefix}/"]
        assert "Clear-Site-Data" not in answer.headers
        assert answer.headers["X-Own"] == "1"


async def test_missing_slash_redirects(world: World, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{world.base}?a=1", headers=world.headers, allow_redirects=False) as answer:
        assert answer.status == 308
        assert answer.headers["Location"] == f"/u/{world.allocation_id}/8000/?a=1"


async def test_streams_both_ways_as_they_come(world: World, http: aiohttp.ClientSession) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async for chunk in request.content.iter_any():
            await response.write(b"<" + chunk + b">")
        await response.write_eof()
        return response

    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def upload() -> AsyncIterator[bytes]:
        for number in range(3):
            yield b"%d" % number
            assert await asyncio.wait_for(heard.get(), 30) == b"<%d>" % number

    async with world.serving(handler), http.post(f"{world.base}/", data=upload(), headers=world.headers) as answer:
        assert answer.headers["Transfer-Encoding"] == "chunked"
        async for chunk in answer.content.iter_any():
            heard.put_nowait(chunk)


async def test_head_and_empty_answers(world: World, http: aiohttp.ClientSession) -> None:
    async def handler(request: web.BaseRequest) -> web.Response:
        if request.method == "HEAD":
            return web.Response(headers={"Content-Length": "1234"})
        return web.Response(status=204)

    async with world.serving(handler):
        for _ in range(2):
            async with http.head(f"{world.base}/", headers=world.headers) as answer:
                assert (answer.status, answer.headers["Content-Length"]) == (200, "1234")
                assert await answer.read() == b""
            async with http.get(f"{world.base}/", headers=world.headers) as answer:
                assert answer.status == 204
    assert world.units.connects == 1


async def test_encoded_bodies_pass_untouched(world: World, http: aiohttp.ClientSession) -> None:
    packed = gzip.compress(b"hello" * 100)

    given = world.headers | {"Content-Encoding": "gzip"}
    session = aiohttp.ClientSession(auto_decompress=False)
    seen: list[bytes] = []

    async def raw_unit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(await reader.readexactly(len(packed)))
        assert b"Content-Encoding: gzip" in head
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed)
        await writer.drain()
        writer.close()

    async with (
        session,
        world.serving_raw(raw_unit),
        session.post(f"{world.base}/", data=packed, headers=given) as answer,
    ):
        assert await answer.read() == packed
    assert seen == [packed]


async def test_connections_to_the_unit_are_kept(world: World, http: aiohttp.ClientSession) -> None:
    async with world.serving(echo):
        for _ in range(20):
            async with http.get(f"{world.base}/", headers=world.headers) as answer:
                await answer.read()
    assert world.units.connects == 1


async def test_unit_that_closes_kept_connections_costs_no_request(world: World, http: aiohttp.ClientSession) -> None:
    async def one_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()

    async with world.serving_raw(one_answer):
        for _ in range(10):
            async with http.get(f"{world.base}/", headers=world.headers) as answer:
                assert await answer.text() == "ok"


async def test_answer_without_length_ends_with_the_connection(world: World, http: aiohttp.ClientSession) -> None:
    async def old_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 100_000)
        await writer.drain()
        writer.close()

    async with world.serving_raw(old_server), http.get(f"{world.base}/", headers=world.headers) as answer:
        assert len(await answer.read()) == 100_000


async def test_http10_client_gets_the_whole_answer(world: World) -> None:
    async def chunked(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"part")
        await response.write_eof()
        return response

    request = (
        f"GET /u/{world.allocation_id}/8000/ HTTP/1.0\r\nHost: localhost\r\nAuthorization: Bearer {world.key}\r\n\r\n"
    )
    async with world.serving(chunked):
        answer = await send_raw(world.gateways[0].url, request.encode())
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"chunked" not in answer
    assert answer.endswith(b"\r\n\r\npart")


async def test_client_that_waits_for_continue_gets_it(world: World) -> None:
    head = (
        f"POST /u/{world.allocation_id}/8000/ HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {world.key}\r\n"
        "Content-Length: 5\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
    )
    async with world.serving(echo):
        port = world.gateways[0].settings.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode())
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hello")
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
    assert b'"body": "hello"' in answer


async def test_hundred_megabytes_each_way_in_little_memory(world: World, http: aiohttp.ClientSession) -> None:
    size, block = 100 << 20, os.urandom(1 << 20)

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        digest, count = hashlib.sha256(), 0
        async for chunk in request.content.iter_any():
            digest.update(chunk)
            count += len(chunk)
        response = web.StreamResponse(headers={"X-Digest": digest.hexdigest(), "X-Count": str(count)})
        await response.prepare(request)
        for _ in range(100):
            await response.write(block)
        await response.write_eof()
        return response

    async def upload() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield block

    expected = hashlib.sha256()
    for _ in range(100):
        expected.update(block)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with world.serving(handler), http.post(f"{world.base}/", data=upload(), headers=world.headers) as answer:
        assert (answer.headers["X-Count"], answer.headers["X-Digest"]) == (str(size), expected.hexdigest())
        got = hashlib.sha256()
        async for chunk in answer.content.iter_any():
            got.update(chunk)
    assert got.hexdigest() == expected.hexdigest()
    # Client, gateway, agent and server are all in this process.
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 48


async def test_slow_client_stops_the_unit_and_nobody_else(world: World, http: aiohttp.ClientSession) -> None:
    written = 0

    async def endless(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal written
        if request.raw_path == "/quick":
            return web.Response(text="quick")
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)
            written += 65536

    async with world.serving(endless), http.get(f"{world.base}/", headers=world.headers) as stalled:
        seen = -1
        while seen != written:
            seen = written
            await asyncio.sleep(0.3)
        assert written < 32 << 20
        async with http.get(f"{world.base}/quick", headers=world.headers) as answer:
            assert await answer.text() == "quick"
        stalled.close()


async def test_client_that_leaves_cancels_the_exchange(world: World, http: aiohttp.ClientSession) -> None:
    left = asyncio.Event()

    async def waiting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.read() == b""
        left.set()
        writer.close()

    async with world.serving_raw(waiting):
        with pytest.raises(asyncio.TimeoutError):
            await http.get(f"{world.base}/", headers=world.headers, timeout=aiohttp.ClientTimeout(total=0.3))
        await asyncio.wait_for(left.wait(), 2)


async def test_early_answer_does_not_wait_for_the_upload(world: World, http: aiohttp.ClientSession) -> None:
    async def impatient(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")
        await writer.drain()
        writer.close()

    async def upload() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.sleep(20)

    async with (
        world.serving_raw(impatient),
        http.post(f"{world.base}/", data=upload(), headers=world.headers) as answer,
    ):
        assert (answer.status, await answer.text()) == (413, "no")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n",
    ],
    ids=["length", "chunked"],
)
async def test_answer_that_breaks_off_never_looks_complete(
    world: World, http: aiohttp.ClientSession, answer: bytes
) -> None:
    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()

    async with world.serving_raw(broken):
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            async with http.get(f"{world.base}/", headers=world.headers) as got:
                await got.read()


async def test_server_that_does_not_speak_http_is_a_bad_gateway(world: World, http: aiohttp.ClientSession) -> None:
    async def ssh(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.0\r\n")
        await reader.read()
        writer.close()

    async with world.serving_raw(ssh), http.get(f"{world.base}/", headers=world.headers) as answer:
        assert answer.status == 502
        assert error_of(await answer.json()) == "access.bad_response"


async def test_unit_that_never_answers_times_out(world: World, http: aiohttp.ClientSession) -> None:
    quick = await world.add_gateway(idle_s=1.0, only="edge")

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with world.serving_raw(silent), http.get(f"{world.at(quick)}/", headers=world.headers) as answer:
        assert answer.status == 504
        assert error_of(await answer.json()) == "access.unit_timeout"

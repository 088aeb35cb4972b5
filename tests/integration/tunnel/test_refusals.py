"""Requests to a unit's port that must not pass."""

import io
from collections.abc import AsyncIterator
from urllib.parse import unquote

import aiohttp
from aiohttp import web

from integration.tunnel.stage import World, error_of, send_raw
from penstock.identity.model import Role

STRANGER = "alc_00000000000000000000000000"


async def hello(request: web.BaseRequest) -> web.Response:
    return web.Response(text="hello")


async def status_of(http: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> tuple[int, str]:
    async with http.get(url, headers=headers) as answer:
        assert answer.headers["X-Correlation-Id"]
        return answer.status, error_of(await answer.json())


async def test_without_a_good_key_it_is_401(world: World, http: aiohttp.ClientSession) -> None:
    key_id, secret = await world.new_key()
    await world.revoke(key_id)
    async with world.serving(hello):
        for headers in (
            {},
            {"Authorization": "Bearer "},
            {"Authorization": "Bearer psk_nonsense"},
            {"Authorization": "Bearer ' OR 1=1--"},
            {"Authorization": "Basic !!!"},
            {"Authorization": aiohttp.encode_basic_auth("admin", "password")},
            {"Authorization": f"Bearer {secret}"},
        ):
            async with http.get(f"{world.base}/", headers=headers) as answer:
                assert answer.status == 401
                assert error_of(await answer.json()) == "unauthenticated"
                assert "Basic" in answer.headers["WWW-Authenticate"]
        assert await status_of(http, f"{world.base}/?key={world.key}", {}) == (401, "unauthenticated")


async def test_viewer_may_not_reach_ports(world: World, http: aiohttp.ClientSession) -> None:
    _, viewer = await world.new_key(Role.VIEWER)
    got = await status_of(http, f"{world.base}/", {"Authorization": f"Bearer {viewer}"})
    assert got == (403, "permission_denied")


async def test_other_projects_allocation_looks_absent(world: World, http: aiohttp.ClientSession) -> None:
    other = World(world.database, world.database_url, world.nats_url, world.folder)
    other.node_id = world.node_id
    await other.set_state("active", project_id="prj_other")
    bodies: list[str] = []
    unnamed: list[str] = []
    for allocation_id in (other.allocation_id, STRANGER, "nonsense", "alc_DEFAULT", "%27--"):
        url = f"{world.gateways[0].url}/u/{allocation_id}/8000/"
        async with http.get(url, headers=world.headers | {"X-Correlation-Id": "same"}) as answer:
            assert answer.status == 404
            told = (await answer.text()).replace(unquote(allocation_id), "?")
            (bodies if allocation_id in (other.allocation_id, STRANGER) else unnamed).append(told)
    assert (len(bodies), len(set(bodies))) == (2, 1)
    # What is no id at all is told so, which says nothing of others.
    assert len(set(unnamed)) == 1
    assert "an id (alc_…) is needed here" in unnamed[0]


async def test_port_that_nobody_listens_on_is_a_bad_gateway(world: World, http: aiohttp.ClientSession) -> None:
    got = await status_of(http, world.at(world.gateways[0], port=8001) + "/", world.headers)
    assert got == (502, "access.port_refused")


async def test_bad_port_is_invalid(world: World, http: aiohttp.ClientSession) -> None:
    for port in ("0", "65536", "-1", "http", "8000.5", "٣", "999999999999999999999"):
        url = f"{world.gateways[0].url}/u/{world.allocation_id}/{port}/"
        async with http.get(url, headers=world.headers) as answer:
            assert answer.status == 400, port
            body = await answer.json()
            assert (error_of(body), body["error"]["field"]) == ("invalid_request", "port")


async def test_allocation_that_is_not_active_conflicts(world: World, http: aiohttp.ClientSession) -> None:
    await world.set_state("releasing")
    assert await status_of(http, f"{world.base}/", world.headers) == (409, "access.not_active")


async def test_allocation_that_waits_for_a_node_conflicts(world: World, http: aiohttp.ClientSession) -> None:
    async with world.database.transaction() as tx:
        await tx.execute(
            "update compute.allocations set state = 'requested', node_id = null, deadline_at = now() where id = $1",
            world.allocation_id,
        )
    assert await status_of(http, f"{world.base}/", world.headers) == (409, "access.not_active")


async def test_browsers_key_is_refused_where_another_page_could_use_it(
    world: World, http: aiohttp.ClientSession
) -> None:
    given = {"Authorization": aiohttp.encode_basic_auth("anybody", world.key)}
    browser = given | {"Sec-Fetch-Site": "same-origin"}
    upgrade = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    execute = f"{world.gateways[0].url}/ws/exec/{world.allocation_id}"
    refused = (403, "access.browser_refused")
    async with world.serving(hello):
        page = browser | {"Referer": f"{world.base}/page"}
        async with http.get(f"{world.base}/", headers=page) as answer:
            assert answer.status == 200
        other = browser | {"Referer": f"{world.gateways[0].url}/u/{STRANGER}/8000/"}
        assert await status_of(http, f"{world.base}/", other) == refused
        own = upgrade | {"Origin": world.gateways[0].url}
        assert await status_of(http, f"{world.base}/", given | own) == refused
        assert await status_of(http, execute, given | upgrade) == refused


async def test_unit_that_the_node_does_not_have_is_absent(world: World, http: aiohttp.ClientSession) -> None:
    world.units.unit_id = "another"
    assert await status_of(http, f"{world.base}/", world.headers) == (404, "not_found")


async def test_node_without_tunnel_is_unavailable(world: World, http: aiohttp.ClientSession) -> None:
    await world.disconnect_node()
    async with http.get(f"{world.base}/", headers=world.headers) as answer:
        assert answer.status == 503
        assert error_of(await answer.json()) == "access.node_unreachable"
        assert int(answer.headers["Retry-After"]) > 0


async def test_unknown_paths_are_absent(world: World) -> None:
    for path in ("/", "/u", "/u/", "/u/x", "/ws/exec", "/v1/models", "/link", "/tunnel", "/peer", "/./healthz"):
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {world.key}\r\nConnection: close"
        answer = await send_raw(world.gateways[0].url, f"{head}\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 404 "), (path, answer)
        assert b'"error"' in answer


async def test_health_and_readiness(world: World, http: aiohttp.ClientSession) -> None:
    for path in ("/healthz", "/readyz"):
        async with http.get(world.gateways[0].url + path) as answer:
            assert (answer.status, await answer.json()) == (200, {"ok": True})


async def test_unknown_query_parameters_are_refused_where_the_query_is_ours(
    world: World, http: aiohttp.ClientSession
) -> None:
    gateway = world.gateways[0].url
    for path in (
        "/healthz",
        "/readyz",
        f"/ws/exec/{world.allocation_id}",
        "/attempts/p/i/current",
        "/attempts/p/i/objects",
    ):
        async with http.get(f"{gateway}{path}?follwo=1", headers=world.headers) as answer:
            body = await answer.json()
            assert (answer.status, body["error"]["field"]) == (400, "follwo"), path
            assert "unknown query parameter" in body["error"]["message"]
    async with world.serving(hello):
        assert (await http.get(f"{world.base}/?follwo=1", headers=world.headers)).status == 200


SMUGGLING = {
    "length and chunked": "Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x",
    "chunked and length": "Transfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n0\r\n\r\nGET /x",
    "two lengths": "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "same length twice": "Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "negative length": "Content-Length: -5\r\n\r\nhello",
    "signed length": "Content-Length: +5\r\n\r\nhello",
    "list of lengths": "Content-Length: 5, 5\r\n\r\nhello",
    "unknown coding": "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked not last": "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "two codings": "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "space before colon": "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "folded header": "X-A: 1\r\n 2\r\n\r\n",
    "bare line feed": "X-A: 1\nX-B: 2\r\n\r\n",
    "zero byte": "X-A: a\0b\r\n\r\n",
    "two hosts": "Host: other\r\n\r\n",
    "long header": f"X-A: {'a' * 40_000}\r\n\r\n",
    "many headers": "X-A: 1\r\n" * 500 + "\r\n",
}


async def test_ambiguous_requests_are_refused_and_the_connection_closed(world: World) -> None:
    seen: list[str] = []

    async def handler(request: web.BaseRequest) -> web.Response:
        seen.append(request.raw_path)
        return web.Response(text="reached")

    head = f"POST /u/{world.allocation_id}/8000/ HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {world.key}\r\n"
    async with world.serving(handler):
        for name, rest in SMUGGLING.items():
            answer = await send_raw(world.gateways[0].url, (head + rest).encode())
            assert answer[:13] in (b"HTTP/1.1 400 ", b"HTTP/1.0 400 "), (name, answer[:200])
            assert answer.count(b"HTTP/1.") == 1, name
            assert b'"error"' in answer
            assert b"aaaa" not in answer
    assert seen == []


ODD_LINES = (
    "GET http://evil.example/u/ HTTP/1.1",
    "CONNECT evil.example:443 HTTP/1.1",
    "GET /u/a b/8000/ HTTP/1.1",
    "GET / HTTP/3.0",
    "nonsense",
    "\x16\x03\x01\x02",
)


async def test_odd_request_lines_are_refused(world: World) -> None:
    for line in ODD_LINES:
        answer = await send_raw(world.gateways[0].url, f"{line}\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        assert answer[:13] in (b"HTTP/1.1 400 ", b"HTTP/1.1 404 ", b"HTTP/1.0 400 "), (line, answer)
        assert b'"error"' in answer


async def test_bad_host_is_refused(world: World) -> None:
    for host in ("", "a b", "a/b", "evil@host", "a" * 300):
        request = f"GET /healthz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        assert (await send_raw(world.gateways[0].url, request.encode())).startswith(b"HTTP/1.1 400 "), host


async def test_connection_header_cannot_take_the_length_away(world: World) -> None:
    async def handler(request: web.BaseRequest) -> web.Response:
        return web.Response(text=f"{request.headers['Content-Length']}:{(await request.read()).decode()}")

    body = "GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
    request = (
        f"POST /u/{world.allocation_id}/8000/ HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {world.key}\r\n"
        f"Connection: close, content-length, host\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )
    async with world.serving(handler):
        answer = await send_raw(world.gateways[0].url, request.encode())
    assert answer.endswith(f"{len(body)}:{body}".encode())


async def test_too_large_a_body_is_refused(world: World, http: aiohttp.ClientSession) -> None:
    small = await world.add_gateway(upload_bytes_max=1 << 20, only="edge")

    async def swallow(request: web.BaseRequest) -> web.Response:
        return web.Response(text=str(len(await request.read())))

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b"x" * 65536

    async with world.serving(swallow):
        async with http.post(f"{world.at(small)}/", data=io.BytesIO(b"x" * (2 << 20)), headers=world.headers) as answer:
            assert (answer.status, error_of(await answer.json())) == (413, "payload_too_large")
        async with http.post(f"{world.at(small)}/", data=pieces(), headers=world.headers) as answer:
            assert (answer.status, error_of(await answer.json())) == (413, "payload_too_large")

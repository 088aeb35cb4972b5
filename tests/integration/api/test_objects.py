"""Objects over the running api: bodies that stream both ways, and clients that misbehave."""

import asyncio
import base64
import hashlib
import io
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from .conftest import Answer, Api, People

MIB = 1 << 20
BIG = os.urandom(12 * MIB)


async def call(
    api: Api, method: str, path: str, key: str, *, data: Any = None, headers: dict[str, str] | None = None
) -> Answer:
    url = f"http://127.0.0.1:{api.port}/api/v1/objects{path}"
    sent = {"Authorization": f"Bearer {key}", **(headers or {})}
    data = io.BytesIO(data) if isinstance(data, bytes) else data
    async with api.session.request(
        method, url, data=data, headers=sent, skip_auto_headers={"Content-Type"}
    ) as response:
        content = await response.read()
        is_json = response.headers.get("Content-Type", "").startswith("application/json")
        parsed = await response.json() if is_json and content else None
        return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, content, parsed)


async def pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), 100_000):
        yield content[start : start + 100_000]


async def rows(api: Api, query: str, *args: object) -> list[Any]:
    conn = await asyncpg.connect(api.database_url)
    try:
        return await conn.fetch(query, *args)
    finally:
        await conn.close()


def folder(api: Api) -> Path:
    return api.log.parent / "objects"


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_object_goes_in_and_comes_out(api: Api, people: People, chunked: bool) -> None:
    key, data = people.developer.key, pieces(BIG) if chunked else BIG
    made = await call(api, "PUT", "/in/out.bin", key, data=data, headers={"Content-Type": "text/plain; charset=x"})
    assert made.status == 200, made.content
    digest = hashlib.sha256(BIG).hexdigest()
    assert (made.json["key"], made.json["size"], made.json["sha256"]) == ("in/out.bin", len(BIG), digest)
    got = await call(api, "GET", "/in/out.bin", people.viewer.key)
    assert (got.status, got.content == BIG) == (200, True)
    assert got.headers["content-type"] == "text/plain; charset=x"
    assert got.headers["etag"] == f'"{digest}"'
    assert got.headers["content-length"] == str(len(BIG))
    assert "sandbox" in got.headers["content-security-policy"]
    head = await call(api, "HEAD", "/in/out.bin", people.viewer.key)
    assert (head.status, head.content) == (200, b"")
    for name in ("content-length", "etag", "content-type", "accept-ranges", "content-sha256"):
        assert head.headers[name] == got.headers[name], name


@pytest.mark.parametrize(
    ("asked", "first", "end"),
    [("bytes=0-0", 0, 1), ("bytes=5-1048580", 5, 1048581), ("bytes=-7", len(BIG) - 7, len(BIG))],
)
async def test_a_part_is_got(api: Api, people: People, asked: str, first: int, end: int) -> None:
    key = people.developer.key
    assert (await call(api, "PUT", "/part", key, data=BIG)).status == 200
    got = await call(api, "GET", "/part", key, headers={"Range": asked})
    assert (got.status, got.content == BIG[first:end]) == (206, True)
    assert got.headers["content-range"] == f"bytes {first}-{end - 1}/{len(BIG)}"


async def test_a_range_that_cannot_be_or_is_for_another_object(api: Api, people: People) -> None:
    key = people.developer.key
    made = (await call(api, "PUT", "/small", key, data=b"0123456789")).json
    out = await call(api, "GET", "/small", key, headers={"Range": "bytes=10-"})
    assert (out.status, out.error["code"]) == (416, "range_not_satisfiable")
    for headers in ({"Range": "bytes=1-2,4-5"}, {"Range": "lines=1-2"}, {"Range": "bytes=1-2", "If-Range": '"x"'}):
        assert (await call(api, "GET", "/small", key, headers=headers)).content == b"0123456789"
    same = {"Range": "bytes=1-2", "If-Range": f'"{made["sha256"]}"'}
    assert (await call(api, "GET", "/small", key, headers=same)).content == b"12"


async def test_objects_are_listed_and_deleted(api: Api, people: People) -> None:
    key = people.developer.key
    for name in ("list/1", "list/2", "list/sub/3", "list/sub/4"):
        assert (await call(api, "PUT", f"/{name}", key, data=b"x")).status == 200
    page = (await call(api, "GET", "?prefix=list/&limit=3", key)).json
    assert [each["key"] for each in page["items"]] == ["list/1", "list/2", "list/sub/3"]
    rest = (await call(api, "GET", f"?prefix=list/&limit=3&cursor={page['next_cursor']}", key)).json
    assert ([each["key"] for each in rest["items"]], rest["next_cursor"]) == (["list/sub/4"], None)
    grouped = (await call(api, "GET", "?prefix=list/&delimiter=/", key)).json
    assert ([each["key"] for each in grouped["items"]], grouped["prefixes"]) == (["list/1", "list/2"], ["list/sub/"])
    assert (await call(api, "DELETE", "/list/1", key)).status == 204
    for method in ("GET", "HEAD", "DELETE"):
        assert (await call(api, method, "/list/1", key)).status == 404


@pytest.mark.parametrize("who", ["sister", "stranger"])
async def test_anothers_object_looks_absent(api: Api, people: People, who: str) -> None:
    stranger = getattr(people, who).key
    assert (await call(api, "PUT", "/private/x", people.owner.key, data=b"canary-object")).status == 200
    for method in ("GET", "HEAD", "DELETE"):
        theirs = await call(api, method, "/private/x", stranger)
        unknown = await call(api, method, "/private/unknown", stranger)
        assert theirs.status == unknown.status == 404
    assert "private" not in str((await call(api, "GET", "?prefix=private", stranger)).json)
    assert (await call(api, "PUT", "/private/x", stranger, data=b"other")).status == 200
    assert (await call(api, "GET", "/private/x", people.owner.key)).content == b"canary-object"


async def test_viewers_read_and_strangers_without_a_key_do_nothing(api: Api, people: People) -> None:
    for method in ("PUT", "DELETE"):
        assert (await call(api, method, "/denied", people.viewer.key)).status == 403
        assert (await call(api, method, "/denied", people.revoked.key)).status == 401


async def test_replacing_can_be_refused(api: Api, people: People) -> None:
    key, once = people.developer.key, {"If-None-Match": "*"}
    assert (await call(api, "PUT", "/once", key, data=b"1", headers=once)).status == 200
    again = await call(api, "PUT", "/once", key, data=b"2", headers=once)
    assert (again.status, again.error["code"]) == (412, "storage.object_exists")
    assert (await call(api, "GET", "/once", key)).content == b"1"


DIGEST = hashlib.sha256(b"abc").digest()


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-SHA256": DIGEST.hex()},
        {"Content-Digest": f"sha-256=:{base64.b64encode(DIGEST).decode()}:"},
        {"Digest": f"SHA-256={base64.b64encode(DIGEST).decode()}"},
    ],
)
async def test_a_digest_is_checked(api: Api, people: People, headers: dict[str, str]) -> None:
    key = people.developer.key
    assert (await call(api, "PUT", "/digest", key, data=b"abc", headers=headers)).status == 200
    wrong = await call(api, "PUT", "/digest", key, data=b"abd", headers=headers)
    assert (wrong.status, wrong.error["code"]) == (400, "storage.digest_mismatch")
    assert (await call(api, "GET", "/digest", key)).content == b"abc"


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"Content-SHA256": "short"}, "Content-SHA256"),
        ({"Digest": "md5=abc"}, "Digest"),
        ({"Content-Digest": "sha-256=:%%:"}, "Content-Digest"),
        ({"If-None-Match": '"etag"'}, "If-None-Match"),
        ({"Content-Type": "nonsense"}, "Content-Type"),
    ],
)
async def test_bad_headers_are_refused_by_name(api: Api, people: People, headers: dict[str, str], field: str) -> None:
    answer = await call(api, "PUT", "/headers", people.developer.key, data=b"x", headers=headers)
    assert (answer.status, answer.error["field"]) == (400, field)


@pytest.mark.parametrize(
    "path", ["/a//b", "/a/../b", "/%2e%2e/b", "/a/./b", "/a/", "//a", "/%0a", "/" + "k" * 1025, "/%C2%85"]
)
async def test_bad_keys_are_refused(api: Api, people: People, path: str) -> None:
    request = (
        f"PUT /api/v1/objects{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {people.developer.key}\r\n"
        "Connection: close\r\nContent-Length: 1\r\n\r\nx"
    )
    received, _ = await api.raw(request.encode())
    assert b" 400 " in received.split(b"\r\n", 1)[0], received
    assert b"storage.bad_key" in received


async def test_too_large_is_told_before_a_byte_is_taken(api: Api, people: People) -> None:
    request = (
        f"PUT /api/v1/objects/large HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {people.developer.key}\r\n"
        f"Content-Length: {(5 << 30) + 1}\r\n\r\n"
    )
    received, closed = await api.raw(request.encode())
    assert (received.split()[1], closed) == (b"413", True)


async def test_a_quota_is_told(api: Api, people: People) -> None:
    await rows(
        api,
        "insert into storage.usage values ($1, $2) on conflict (project_id) do update set bytes_used = $2",
        people.sister.project_id,
        100 << 30,
    )
    answer = await call(api, "PUT", "/full", people.sister.key, data=b"x")
    assert (answer.status, answer.error["code"]) == (429, "storage.quota_exceeded")
    await rows(api, "delete from storage.usage where project_id = $1", people.sister.project_id)


@pytest.mark.parametrize("length", [f"Content-Length: {len(BIG)}", "Transfer-Encoding: chunked"])
async def test_an_upload_that_breaks_off_leaves_nothing(api: Api, people: People, length: str) -> None:
    request = (
        "PUT /api/v1/objects/broken HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {people.developer.key}\r\n{length}\r\n\r\n"
    )
    chunk = b"100000\r\n" + b"x" * MIB + b"\r\n" if "chunked" in length else b"x" * MIB
    _, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(request.encode() + chunk * 9)
    await writer.drain()
    writing = "select id from storage.blobs where state = 'writing'"
    async with asyncio.timeout(20):
        while not await rows(api, writing):
            await asyncio.sleep(0.02)
    [blob] = await rows(api, writing)
    writer.transport.abort()
    async with asyncio.timeout(20):
        while await rows(api, "select 1 from storage.blobs where id = $1", blob["id"]):
            await asyncio.sleep(0.05)
    assert not list(folder(api).rglob(f"{blob['id']}*"))
    assert (await call(api, "GET", "/broken", people.developer.key)).status == 404
    used = await rows(
        api,
        "select bytes_used - (select coalesce(sum(size), 0) from storage.objects where project_id = $1) as extra"
        " from storage.usage where project_id = $1",
        people.developer.project_id,
    )
    assert used[0]["extra"] == 0


async def test_nothing_is_smuggled_behind_a_body_of_two_lengths(api: Api, people: People) -> None:
    """The server drops the length for the chunks; what follows them on the connection is never taken for a request."""
    request = (
        f"PUT /api/v1/objects/both HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {people.developer.key}\r\n"
        "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"
        f"DELETE /api/v1/objects/both HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {people.developer.key}\r\n\r\n"
    )
    received, closed = await api.raw(request.encode())
    assert (received.count(b"HTTP/1.1 "), closed) == (1, True)


async def test_other_routes_take_no_chunks(api: Api, people: People) -> None:
    for target in ("/api/v1/skus/objects", "/api/v1/objectsx"):
        request = (
            f"PUT {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {people.developer.key}\r\n"
            "Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"
        )
        received, _ = await api.raw(request.encode())
        assert received.split()[1] == b"400"
        assert b"Transfer-Encoding is not accepted" in received


async def test_a_reader_that_stops_reading_does_not_fill_the_server(api: Api, people: People) -> None:
    """Bodies wait in the store, not in memory: one slow reader each of eight holds little of 96 MiB."""
    key = people.developer.key
    assert (await call(api, "PUT", "/slow", key, data=BIG)).status == 200
    before = _memory(api)
    request = f"GET /api/v1/objects/slow HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n"
    opened = [await asyncio.open_connection("127.0.0.1", api.port, limit=1024) for _ in range(8)]
    for reader, writer in opened:
        writer.write(request.encode())
        assert b"200" in await reader.readline()
    await asyncio.sleep(0.5)
    grown = _memory(api) - before
    for _, writer in opened:
        writer.transport.abort()
    assert grown < 60 * MIB


def _memory(api: Api) -> int:
    pages = int(Path(f"/proc/{api.process.pid}/statm").read_text().split()[1])
    return pages * 4096

"""Before a body is read: the query's names, who is there, and what they may. Over all routes of the contract."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from .conftest import Api, People
from .operations import BODIES, VIEWER_MAY, Operation

PUBLIC_BYTES_MAX = 64 << 10
EVENT_BYTES_MAX = 256 << 10
#: Far below what a document of a mebibyte costs when a text is made for each of its elements.
MEMORY_BYTES_MAX = 48 << 20
HELD_S_MAX = 1.0
#: Written while requests only look: when a key was used last.
TOUCHED = {"identity.api_keys", "identity.keys"}
SHAPES = {
    "lists": b"[],",
    "objects": b"{},",
    "numbers": b"1,",
    "texts": b'"",',
    "open lists": b"[",
    "open objects": b'{"a":',
    "escapes": b'"\\u0000",',
    "spaces": b" ",
    "digits": b"9",
    "no text": b"\xff",
}


def _document(piece: bytes, size: int) -> bytes:
    """`{"token": […` of this size."""
    return (b'{"token": [' + piece * (size // len(piece) + 1))[: size - 2] + b"]}"


async def test_an_unknown_query_parameter_is_refused_by_name_and_nothing_changes(
    api: Api, operations: list[Operation], objects: dict[str, str]
) -> None:
    before = await _contents(api)
    for operation in operations:
        path = f"{operation.at(objects)}?follwo=1"
        answer = await api.call(operation.method, path, json=BODIES.get(operation.id))
        assert answer.status == 400, (operation, answer.content)
        assert answer.error["field"] == "follwo", operation
        assert "unknown query parameter" in answer.error["message"]
    assert await _contents(api) == before


async def _contents(api: Api) -> dict[str, str]:
    """A digest of each table."""
    conn = await asyncpg.connect(api.database_url)
    try:
        tables = await conn.fetch(
            "select format('%I.%I', schemaname, tablename) as name from pg_tables"
            " where schemaname not in ('pg_catalog', 'information_schema')"
        )
        return {
            table["name"]: await conn.fetchval(
                f"select md5(coalesce(string_agg(row::text, ';' order by row::text), '')) from {table['name']} row"
            )
            for table in tables
            if table["name"] not in TOUCHED
        }
    finally:
        await conn.close()


async def test_who_may_not_is_refused_before_a_body_comes(
    api: Api, people: People, operations: list[Operation], objects: dict[str, str]
) -> None:
    """Only the head is sent, and announces a body: the answer does not wait for it."""
    walked = 0
    for operation in operations:
        if operation.public or operation.method == "GET":
            continue
        for key, status in (("", 401), (people.viewer.key, 403)):
            if key and (operation.id in VIEWER_MAY or not operation.has_body):
                continue
            assert await _status_of_head(api, operation, objects, key) == status, operation
            walked += 1
    assert walked > 60


async def _status_of_head(api: Api, operation: Operation, ids: dict[str, str], key: str) -> int:
    credential = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"{operation.method} /api/v1{operation.at(ids)} HTTP/1.1\r\nHost: x\r\n{credential}Idempotency-Key: i\r\n"
        "Content-Type: application/json\r\nContent-Length: 500000\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    try:
        writer.write(head.encode())
        async with asyncio.timeout(30):
            return int((await reader.readline()).split(b" ")[1])
    finally:
        writer.close()


async def test_bodies_of_those_who_may_not_cost_nothing(
    api: Api, people: People, operations: list[Operation], objects: dict[str, str]
) -> None:
    async with _cheap(api):
        for operation in operations:
            if operation.public or not operation.has_body:
                continue
            for key, status in (("", 401), (people.viewer.key, 403)):
                for body in (b'{"a":', _document(b"[],", 1 << 20)):
                    answer = await api.call(operation.method, operation.at(objects), key=key, body=body)
                    assert answer.status == status, (operation, answer.content)


@pytest.mark.parametrize("path", ["/sessions", "/enrolments"])
async def test_bodies_without_a_key_are_small_and_cost_little(api: Api, path: str) -> None:
    async with _cheap(api):
        for shape in SHAPES.values():
            for size, status in ((PUBLIC_BYTES_MAX, 400), (149_000, 413), (1 << 20, 413)):
                answer = await api.call("POST", path, key="", body=_document(shape, size))
                assert (answer.status, answer.error["code"]) == (
                    status,
                    "invalid_request" if status == 400 else "payload_too_large",
                ), shape


async def test_events_of_providers_are_small_and_their_signature_comes_first(api: Api) -> None:
    async with _cheap(api):
        for shape in SHAPES.values():
            for size, status in ((EVENT_BYTES_MAX, 400), (EVENT_BYTES_MAX + 1, 413)):
                answer = await api.call("POST", "/webhooks/local", key="", body=_document(shape, size))
                assert answer.status == status, answer.content
                assert status == 413 or answer.error["code"] == "billing.bad_signature", answer.content


@asynccontextmanager
async def _cheap(api: Api) -> AsyncIterator[None]:
    """The api's memory grows by little meanwhile, and its loop is never held for long."""
    Path(f"/proc/{api.process.pid}/clear_refs").write_text("5")
    before = _bytes(api, "VmRSS")
    held = asyncio.ensure_future(_longest_answer(api))
    try:
        yield
    finally:
        held.cancel()
    assert _bytes(api, "VmHWM") - before < MEMORY_BYTES_MAX
    assert await held < HELD_S_MAX


async def _longest_answer(api: Api) -> float:
    longest = 0.0
    try:
        while True:
            began = time.monotonic()
            async with api.session.get(f"http://127.0.0.1:{api.port}/healthz"):
                longest = max(longest, time.monotonic() - began)
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        return longest


def _bytes(api: Api, name: str) -> int:
    lines = Path(f"/proc/{api.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))

"""Rubbish on the routes of functions: refused by field, never a failure of the server, and nothing is changed."""

import asyncio
import io
import json
from typing import Any

import asyncpg
import pytest

from .conftest import Api

FUNCTION = {"sku": "g1.1"}
UNIT = {"operationID": "o", "name": "n", "specName": "g1.1", "serverless": {"enabled": True, "requestID": "n"}}
DEEP = b"[" * 50_000 + b"]" * 50_000

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("a line break after the id", {"invocationID": "abc\n"}, "invocationID"),
    ("a zero byte in an attribute", {"attributes": {"a": "\0"}}, "attributes"),
    ("attributes too large for a message", {"attributes": {"a": "x" * 20_000}}, "attributes"),
    ("a zero byte in the content type", {"contentType": "a\0b"}, "contentType"),
    ("a line break in the content type", {"contentType": "a\r\nb"}, "contentType"),
    ("a zero byte in a header", {"headers": {"a": "\0"}}, "headers"),
    ("another project's name", {"serverlessRequestID": "prj_" + "0" * 26 + "_f"}, "serverlessRequestID"),
    ("a name that is none", {"serverlessRequestID": "a.b"}, "serverlessRequestID"),
    ("a name with a line break", {"serverlessRequestID": "inputs\n"}, "serverlessRequestID"),
]


@pytest.fixture
async def function(api: Api) -> str:
    answer = await api.call("PUT", "/functions/inputs", json=FUNCTION)
    assert answer.status == 200
    return "inputs"


@pytest.mark.parametrize(("what", "changed", "field"), REFUSED, ids=[what for what, _, _ in REFUSED])
async def test_an_invocation_that_cannot_be_is_refused_by_field(
    api: Api, function: str, what: str, changed: dict[str, Any], field: str
) -> None:
    answer = await api.call("POST", "/serverless/invocations", json={"serverlessRequestID": function, **changed})
    assert (answer.status, answer.error["field"].partition(".")[0]) == (400, field), answer.content


async def test_one_that_cannot_be_kept_harms_no_other(api: Api, function: str) -> None:
    bad = {"serverlessRequestID": function, "attributes": {"a": "\0"}}
    good = {"serverlessRequestID": function}
    answers = await asyncio.gather(
        *(api.call("POST", "/serverless/invocations", json=each) for each in [good, bad, good, bad, good] * 4)
    )
    assert [answer.status for answer in answers] == [202, 400, 202, 400, 202] * 4


async def test_json_that_is_too_deep_is_refused(api: Api, function: str) -> None:
    bodies = (
        ("/serverless/invocations", b'{"serverlessRequestID": "inputs", "payload": ' + DEEP + b"}"),
        (f"/functions/{function}/map", b'{"payloads": [' + DEEP + b"]}"),
    )
    for path, body in bodies:
        answer = await api.call("POST", path, body=body)
        assert answer.status == 400, (path, answer.status)


async def test_names_with_rubbish_are_nobodys(api: Api) -> None:
    for rubbish in ("%00", "a%0Ab", "%FF", "..%2F..", "x" * 300, "%F0%9F%98%80", "a%20b", "'%3B--"):
        for method, path in (
            ("GET", f"/functions/{rubbish}"),
            ("DELETE", f"/functions/{rubbish}"),
            ("GET", f"/functions/{rubbish}/versions"),
            ("GET", f"/functions/{rubbish}/workers"),
            ("GET", f"/functions/{rubbish}/logs"),
            ("GET", f"/invocations/{rubbish}"),
            ("GET", f"/invocations/{rubbish}/result"),
            ("GET", f"/invocations/{rubbish}/events"),
            ("POST", f"/invocations/{rubbish}/cancel"),
            ("POST", f"/invocations/{rubbish}/retry"),
            ("GET", f"/gpu-units/{rubbish}"),
            ("DELETE", f"/gpu-units/{rubbish}"),
            ("POST", f"/serverless/dead-letters/{rubbish}/replay"),
            ("DELETE", f"/serverless/dead-letters/{rubbish}"),
        ):
            answer = await api.call(method, path)
            assert answer.status in (400, 404), (method, path, answer.status)
        for method, path, body in (
            ("PUT", f"/functions/{rubbish}", FUNCTION),
            ("PUT", f"/gpu-units/{rubbish}", UNIT),
            ("POST", f"/functions/{rubbish}/rollback", {}),
            ("POST", f"/functions/{rubbish}/map", {"payloads": [1]}),
        ):
            answer = await api.call(method, path, json=body)
            assert answer.status in (400, 404), (method, path, answer.status)


async def test_questions_with_rubbish_are_refused_or_find_nothing(api: Api, function: str) -> None:
    for query in (
        "/invocations?state=%00",
        "/invocations?function=%00",
        "/invocations?cursor=%00",
        "/invocations?cursor=WyJpdiIsMTAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMF0",
        "/invocations?cursor=WyJpdiIsImEiXQ",
        "/functions?cursor=WyJmbiIsIlx1MDAwMCJd",
        f"/functions/{function}/versions?cursor=WyJmdiIsOTk5OTk5OTk5OTk5OV0",
        f"/functions/{function}/workers?cursor=WyJmdyIsIlx1MDAwMCJd",
        f"/functions/{function}/logs?cursor=WyJmbCIsOTk5OTk5OTk5OTk5OTk5OTk5OTk5OTldIl0",
        f"/functions/{function}/logs?invocation=%00",
        "/serverless/dead-letters?function=%00",
        "/serverless/dead-letters?cursor=WyJkbCIsIlx1MDAwMCJd",
        "/gpu-units?cursor=WyJndSIsIlx1MDAwMCJd",
    ):
        answer = await api.call("GET", query)
        assert answer.status in (200, 400), (query, answer.status, answer.content)


async def test_a_map_with_ids_that_came_before_makes_nothing(api: Api, function: str) -> None:
    first = await api.call("POST", f"/functions/{function}/map", json={"id": "inputs-batch", "payloads": [1, 2]})
    assert first.status == 201
    again = await api.call("POST", f"/functions/{function}/map", json={"id": "inputs-batch", "payloads": [1, 2]})
    assert (again.status, again.json) == (201, first.json)
    other = await api.call("POST", f"/functions/{function}/map", json={"id": "inputs-batch", "payloads": [9, 2, 3]})
    assert (other.status, other.error["code"]) == (409, "serverless.id_reused")
    assert (await api.call("GET", "/invocations/inputs-batch-2")).status == 404
    broken = await api.call("POST", f"/functions/{function}/map", json={"id": "batch\n", "payloads": [1]})
    assert (broken.status, broken.error["field"]) == (400, "id")


async def test_a_large_payload_that_is_refused_leaves_no_object(api: Api, function: str) -> None:
    async def send(letter: str) -> int:
        body = {"serverlessRequestID": function, "invocationID": "large", "payload": letter * (1 << 21)}
        sent: Any = io.BytesIO(json.dumps(body).encode())
        return (await api.call("POST", "/serverless/invocations", body=sent)).status

    assert [await send(letter) for letter in "aba"] == [202, 409, 200]
    conn = await asyncpg.connect(api.database_url)
    try:
        keys = await conn.fetch("select key from storage.objects where starts_with(key, 'invocations/large/')")
        kept = await conn.fetchval("select payload_ref ->> 'key' from serverless.invocations where id = 'large'")
    finally:
        await conn.close()
    assert [row["key"] for row in keys] == [kept]


async def test_items_of_a_map_have_their_turns_in_order(api: Api, function: str) -> None:
    made = await api.call("POST", f"/functions/{function}/map", json={"payloads": list(range(30))})
    conn = await asyncpg.connect(api.database_url)
    try:
        rows = await conn.fetch(
            "select id from serverless.invocations where starts_with(id, $1) order by due_at, seq", made.json["id"]
        )
    finally:
        await conn.close()
    assert [row["id"] for row in rows] == made.json["invocations"]

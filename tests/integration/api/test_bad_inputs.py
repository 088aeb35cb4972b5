"""Every row of the list of bad inputs for the api, sent to the running process."""

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from bad_inputs import Checks, rows
from oidc_provider import Signer, run_signer
from penstock.identity import store
from penstock.identity.credentials import digest

from .conftest import Answer, Api, People

ROWS = rows("api")
CHECKS = Checks()
row = CHECKS.row


@pytest.mark.parametrize("row_id", ROWS)
async def test_bad_input_is_answered_as_listed(row_id: str, api: Api, people: People) -> None:
    await CHECKS[row_id](api, people)
    alive = await api.call("GET", "/whoami")
    assert alive.status == 200
    assert "Traceback" not in api.log.read_text()


def test_every_row_has_a_check() -> None:
    assert set(CHECKS) == set(ROWS)


async def refused(api: Api, body: bytes | dict[str, Any], *, field: str, says: str) -> None:
    """400 from creating an allocation, naming field and reason, and nothing was created."""
    raw = body if isinstance(body, bytes) else json.dumps({"sku": "g1.1", **body}).encode()
    before = await count(api)
    answer = await api.call("POST", "/allocations", body=raw)
    assert answer.status == 400, answer.content
    assert answer.error["code"].endswith(("invalid_request", "invalid_gpus", "bad_gpu_count")) or field == "gpus"
    assert answer.error.get("field") == field, answer.error
    assert says in answer.error["message"], answer.error
    assert await count(api) == before


async def count(api: Api) -> int:
    conn = await asyncpg.connect(api.database_url)
    try:
        return await conn.fetchval("select count(*) from compute.allocations")
    finally:
        await conn.close()


@row("api-01")
async def _(api: Api, _: People) -> None:
    await refused(api, b"{", field="$", says="body is not valid JSON at byte 1")


@row("api-02")
async def _(api: Api, _: People) -> None:
    await refused(api, b"", field="$", says="body required")


@row("api-04")
async def _(api: Api, _: People) -> None:
    await refused(api, b"[]", field="$", says="expected an object")


@row("api-06")
async def _(api: Api, _: People) -> None:
    await refused(api, b'{"sku":"g1.1","gpus":1,"gpus":8}', field="gpus", says="duplicate key")


@row("api-08")
async def _(api: Api, _: People) -> None:
    await refused(api, {"gpus": 1.5}, field="gpus", says="integer")


@row("api-09")
async def _(api: Api, _: People) -> None:
    await refused(api, {"gpus": "1"}, field="gpus", says="expected an integer, not string")


@row("api-11")
async def _(api: Api, _: People) -> None:
    await refused(api, b'{"sku":"g1.1","gpus":NaN}', field="$", says="body is not valid JSON at byte 21")


@row("api-12")
async def _(api: Api, _: People) -> None:
    await refused(api, {"gpus": 9223372036854775808}, field="gpus", says="1, 2")


@row("api-14")
async def _(api: Api, _: People) -> None:
    await refused(api, {"name": "n" * 300}, field="name", says="max 63")


@row("api-15")
async def _(api: Api, _: People) -> None:
    await refused(api, {"name": "../../etc"}, field="name", says="pattern")


@row("api-17")
async def _(api: Api, _: People) -> None:
    await refused(api, b'{"sku":"g1.1","name":"\\ud800"}', field="name", says="invalid unicode")


@row("api-18")
async def _(api: Api, _: People) -> None:
    await refused(api, {"name": "a\u202eb"}, field="name", says="control characters are not allowed")
    raw = '{"sku":"g1.1","name":"a\u202eb"}'.encode()
    await refused(api, raw, field="name", says="control characters are not allowed")


def head(api: Api, *lines: str) -> bytes:
    """The head of a POST, authenticated."""
    fixed = ("POST /api/v1/allocations HTTP/1.1", f"Authorization: Bearer {api.admin_key}")
    return "\r\n".join((*fixed, "Content-Type: application/json", *lines, "", "")).encode()


def status(received: bytes) -> int:
    return int(received.split(b" ", 2)[1])


@row("api-20")
async def _(api: Api, _: People) -> None:
    started = time.monotonic()
    request = head(api, "Host: localhost", f"Content-Length: {50 << 20}") + b"x" * 65536
    received, closed = await api.raw(request)
    assert status(received) == 413
    assert b"payload_too_large" in received
    assert closed
    assert time.monotonic() - started < 8, "it did not wait for the rest"


@row("api-21")
async def _(api: Api, _: People) -> None:
    started = time.monotonic()
    received, closed = await api.raw(head(api, "Host: localhost", "Content-Length: 10") + b'{"a":', timeout_s=15)
    assert status(received) == 408
    assert closed
    assert time.monotonic() - started < 10


@row("api-22")
async def _(api: Api, _: People) -> None:
    length, chunked = "Content-Length: 2", "Transfer-Encoding: chunked"
    smuggled = b"0\r\n\r\nGET /api/v1/whoami HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for lines in ((length, chunked), (chunked, length), (chunked,)):
        received, closed = await api.raw(head(api, "Host: localhost", *lines) + smuggled)
        assert status(received) == 400, lines
        assert received.count(b"HTTP/1.1") == 1
        assert closed


@row("api-23")
async def _(api: Api, _: People) -> None:
    received, closed = await api.raw(head(api, "Host: localhost", "Content-Length: 2", "Content-Length: 3") + b"{} ")
    assert status(received) == 400
    assert closed


@row("api-25")
async def _(api: Api, _: People) -> None:
    for host in ("example.com/abc?x=", "a b", "example.com@evil", ""):
        request = f"GET /api/v1/whoami HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {api.admin_key}\r\n\r\n"
        received, closed = await api.raw(request.encode())
        assert status(received) == 400, host
        assert b"bad Host header" in received
        assert closed


@row("api-26")
async def _(api: Api, people: People) -> None:
    forged = {"X-Forwarded-For": "10.9.8.7", "X-User-Id": "usr_default", "X-Forwarded-Proto": "https"}
    plain = await api.call("GET", "/whoami", key=people.viewer.key)
    answer = await api.call("GET", "/whoami", key=people.viewer.key, headers=forged)
    assert answer.json == plain.json
    await api.call("GET", "/whoami", key="psk_" + "a" * 43, headers=forged)
    assert "10.9.8.7" not in api.log.read_text()


async def unauthenticated(api: Api, authorization: str, *, says: str = "") -> Answer:
    answer = await api.call("GET", "/whoami", key="", headers={"Authorization": authorization})
    assert answer.status == 401, answer.content
    assert says in answer.error["message"]
    assert answer.headers["www-authenticate"] == "Bearer"
    return answer


@row("api-27")
async def _(api: Api, _: People) -> None:
    answer = await unauthenticated(api, "Bearer ")
    assert answer.error["code"] == "unauthenticated"


def jwt(header: dict[str, Any], claims: dict[str, Any], sign: Callable[[bytes], bytes]) -> str:
    def part(raw: bytes) -> str:
        return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()

    signed = f"{part(json.dumps(header).encode())}.{part(json.dumps(claims).encode())}"
    return f"Bearer {signed}.{part(sign(signed.encode()))}"


@asynccontextmanager
async def known_signer(api: Api) -> AsyncIterator[Signer]:
    """An issuer that the cloud believes."""
    async with run_signer() as signer:
        body = {"issuer": signer.issuer, "client_id": "penstock"}
        assert (await api.call("PUT", "/identity-providers/signer", json=body)).status == 200
        good = await api.call("GET", "/whoami", key=signer.token())
        assert good.error["code"] == "identity.no_role"
        yield signer
        assert (await api.call("DELETE", "/identity-providers/signer")).status == 204


def claims(signer: Signer) -> dict[str, Any]:
    return {"iss": signer.issuer, "sub": "admin", "aud": "penstock", "exp": time.time() + 600}


@row("api-28")
async def _(api: Api, _: People) -> None:
    async with known_signer(api) as signer:
        for alg in ("none", "None", "NONE", ""):
            await unauthenticated(api, jwt({"alg": alg}, claims(signer), lambda _: b""))


@row("api-29")
async def _(api: Api, _: People) -> None:
    async with known_signer(api) as signer:
        pem = signer.key.as_pem(private=False)
        token = jwt(
            {"alg": "HS256", "kid": "signer"},
            claims(signer),
            lambda raw: hmac.new(pem, raw, hashlib.sha256).digest(),
        )
        await unauthenticated(api, token)


@row("api-30")
async def _(api: Api, _: People) -> None:
    async with known_signer(api) as signer:
        await unauthenticated(api, f"Bearer {signer.token(exp=time.time() - 61)}", says="token expired")
        within = await api.call("GET", "/whoami", key=signer.token(exp=time.time() - 50))
        assert within.error["code"] == "identity.no_role"


@row("api-31")
async def _(api: Api, _: People) -> None:
    async with known_signer(api) as signer:
        await unauthenticated(api, f"Bearer {signer.token(aud='another')}", says="another audience")
        await unauthenticated(api, f"Bearer {signer.token(aud=['penstock', 'x'], azp='x')}", says="another audience")


@row("api-32")
async def _(api: Api, _: People) -> None:
    await unauthenticated(api, "Bearer ' OR 1=1--")
    shaped = "psk_' OR 1=1--".ljust(47, "a")
    await unauthenticated(api, f"Bearer {shaped}")
    recorder = Recorder()
    assert await store.find_credential(recorder, digest(shaped), None) is None
    assert [args for _, args in recorder.seen] == [(digest(shaped), None)]
    assert "OR 1=1" not in recorder.seen[0][0]


class Recorder:
    """Stands for a connection and keeps what it was asked."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, tuple[object, ...]]] = []

    async def fetchrow(self, query: str, *args: object) -> None:
        self.seen.append((query, args))


@row("api-34")
async def _(api: Api, people: People) -> None:
    for name in ("tenant_id", "role"):
        body = {"name": "renamed", name: "owner"}
        answer = await api.call("PATCH", f"/projects/{people.owner.project_id}", key=people.owner.key, json=body)
        assert answer.status == 400
        assert answer.error["field"] == name
        assert "read-only" in answer.error["message"]
    shown = await api.call("GET", f"/projects/{people.owner.project_id}", key=people.owner.key)
    assert shown.json["name"] == "home"


@row("api-35")
async def _(api: Api, people: People) -> None:
    wide = {"name": "wide", "role": "owner"}
    answer = await api.call("POST", "/keys", key=people.developer.key, json=wide)
    assert answer.status == 403
    assert answer.error["code"] == "identity.scope_exceeds_caller"
    assert "scope exceeds caller" in answer.error["message"]


@row("api-37")
async def _(api: Api, _: People) -> None:
    for key in ("k" * 300, "schlüssel", "two words", "tab\tin"):
        request = json.dumps({"sku": "g1.1"}).encode()
        length = f"Content-Length: {len(request)}"
        raw = head(api, "Host: localhost", "Connection: close", length, f"Idempotency-Key: {key}") + request
        received, _closed = await api.raw(raw)
        assert status(received) == 400, key
        assert b"255 printable ASCII" in received


@row("api-38")
async def _(api: Api, people: People) -> None:
    """The first call cannot append its event, because another transaction holds the outbox."""
    headers = {"Idempotency-Key": "still-running"}
    conn = await asyncpg.connect(api.database_url)
    async with conn.transaction():
        await conn.execute("lock table kit.outbox in share mode")
        first = asyncio.create_task(api.call("POST", "/projects", json={"name": "slow"}, headers=headers))
        await asyncio.sleep(0.3)
        second = await api.call("POST", "/projects", json={"name": "slow"}, headers=headers)
    await conn.close()
    assert second.status == 409
    assert second.error["code"] == "in_progress"
    assert second.headers["retry-after"] == "1"
    assert (await first).status == 201
    third = await api.call("POST", "/projects", json={"name": "slow"}, headers=headers)
    assert third.content == (await first).content


@row("api-39")
async def _(api: Api, _: People) -> None:
    cursor = (await api.call("GET", "/projects?limit=1")).json["next_cursor"]
    assert (await api.call("GET", f"/projects?limit=1&cursor={cursor}")).status == 200
    for position in range(len(cursor)):
        edited = cursor[:position] + ("A" if cursor[position] != "A" else "B") + cursor[position + 1 :]
        answer = await api.call("GET", f"/projects?cursor={edited}")
        assert answer.status == 400, edited
        assert answer.error["message"] == "invalid cursor"


@row("api-40")
async def _(api: Api, _: People) -> None:
    answer = await api.call("GET", "/projects?limit=1000000")
    assert answer.status == 400
    assert answer.error["field"] == "limit"
    assert "max 200" in answer.error["message"]

"""Secrets over the running api: written and never read, by whom they may be, and nowhere in the clear."""

import base64
from typing import Any

import asyncpg
import pytest

from .conftest import Api, People

CANARY = "canary-5e7c0ffee"


async def put(api: Api, name: str, body: Any, key: str, **headers: str) -> Any:
    return await api.call("PUT", f"/secrets/{name}", json=body, key=key, headers=headers)


async def test_a_secret_is_set_listed_shown_and_deleted_and_never_read(api: Api, people: People) -> None:
    key = people.developer.key
    first = await put(api, "life", {"value": f"{CANARY}-1"}, key)
    assert first.status == 200, first.content
    assert first.json["version"] == 1
    encoded = base64.b64encode(f"{CANARY}-2".encode()).decode()
    second = await put(api, "life", {"value_base64": encoded}, key)
    assert second.json["version"] == 2
    shown = await api.call("GET", "/secrets/life", key=people.viewer.key)
    assert [each["version"] for each in shown.json["versions"]] == [2, 1]
    listed = await api.call("GET", "/secrets?limit=200", key=people.viewer.key)
    assert "life" in [each["name"] for each in listed.json["items"]]
    for answer in (first, second, shown, listed):
        assert CANARY.encode() not in answer.content
        assert encoded.encode() not in answer.content
    assert (await api.call("DELETE", "/secrets/life", key=key)).status == 204
    for method in ("GET", "DELETE"):
        assert (await api.call(method, "/secrets/life", key=key)).status == 404


async def test_lists_have_pages(api: Api, people: People) -> None:
    for name in ("p1", "p2", "p3"):
        assert (await put(api, name, {"value": "v"}, people.sister.key)).status == 200
    found: list[str] = []
    cursor = ""
    while True:
        page = (await api.call("GET", f"/secrets?limit=2{cursor}", key=people.sister.key)).json
        found += [each["name"] for each in page["items"]]
        if not page["next_cursor"]:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert [name for name in found if name.startswith("p")] == ["p1", "p2", "p3"]


@pytest.mark.parametrize("who", ["sister", "stranger"])
async def test_anothers_secret_looks_absent(api: Api, people: People, who: str) -> None:
    stranger = getattr(people, who).key
    assert (await put(api, "private", {"value": CANARY}, people.owner.key)).status == 200
    for method in ("GET", "DELETE"):
        theirs = await api.call(method, "/secrets/private", key=stranger)
        unknown = await api.call(method, "/secrets/unknown", key=stranger)
        assert theirs.status == unknown.status == 404
        assert (theirs.error["message"], unknown.error["message"]) == ("no secret private", "no secret unknown")
    refused = await api.call(
        "POST", "/allocations", json={"sku": "g1.1", "secrets": [{"name": "private"}]}, key=stranger
    )
    assert (refused.status, refused.error["code"], refused.error["field"]) == (400, "secrets.unknown_secret", "secrets")
    assert (await put(api, "private", {"value": "mine"}, stranger)).json["version"] == 1
    assert (await api.call("GET", "/secrets/private", key=people.owner.key)).json["version"] >= 1


async def test_viewers_see_names_and_set_nothing(api: Api, people: People) -> None:
    assert (await put(api, "denied", {"value": "v"}, people.viewer.key)).status == 403
    assert (await api.call("DELETE", "/secrets/denied", key=people.viewer.key)).status == 403


@pytest.mark.parametrize(
    ("name", "body", "status", "field"),
    [
        ("ok", {}, 400, "value"),
        ("ok", {"value": ""}, 400, "value"),
        ("ok", {"value": "v", "value_base64": "dg=="}, 400, "value"),
        ("ok", {"value_base64": "%%%"}, 400, "value_base64"),
        ("ok", {"value_base64": "dg"}, 400, "value_base64"),
        ("ok", {"value": 7}, 400, "value"),
        ("ok", {"value": "x" * ((64 << 10) + 1)}, 400, "value"),
        ("ok", {"value": "é" * (64 << 10)}, 400, "value"),
        ("ok", {"value_base64": base64.b64encode(b"x" * ((64 << 10) + 1)).decode()}, 400, "value"),
        ("ok", {"value_base64": "x" * (90 << 10)}, 400, "value_base64"),
        ("ok", {"value": "v", "extra": 1}, 400, "extra"),
        ("UPPER", {"value": "v"}, 400, "name"),
        ("a" * 64, {"value": "v"}, 400, "name"),
        ("-dash", {"value": "v"}, 400, "name"),
        ("under_score", {"value": "v"}, 400, "name"),
    ],
)
async def test_bad_input_is_refused_by_field(
    api: Api, people: People, name: str, body: Any, status: int, field: str
) -> None:
    answer = await put(api, name, body, people.developer.key)
    assert (answer.status, answer.error["field"]) == (status, field), answer.content
    assert (await api.call("GET", f"/secrets/{name}", key=people.developer.key)).status == 404


@pytest.mark.parametrize(
    ("uses", "env", "code"),
    [
        ([{"name": "g1.1", "env": "LD_PRELOAD"}], {}, "compute.reserved_env"),
        ([{"name": "g1.1", "env": "penstock_x"}], {}, "compute.reserved_env"),
        ([{"name": "g1.1", "env": "1A"}], {}, "invalid_request"),
        ([{"name": "g1.1", "env": "A"}], {"A": "1"}, "invalid_request"),
        ([{"name": "g1.1"}, {"name": "g1.1"}], {}, "invalid_request"),
        ([{"name": "one", "env": "A"}, {"name": "two", "env": "A"}], {}, "invalid_request"),
        ([{"name": "unknown-one"}], {}, "secrets.unknown_secret"),
    ],
)
async def test_bad_uses_of_secrets_are_refused(
    api: Api, people: People, uses: Any, env: dict[str, str], code: str
) -> None:
    body = {"sku": "g1.1", "secrets": uses, "env": env}
    answer = await api.call("POST", "/allocations", json=body, key=people.developer.key)
    assert (answer.status, answer.error["code"], answer.error["field"]) == (400, code, "secrets"), answer.content


async def test_one_key_one_version_and_the_kept_digest_guesses_nothing(api: Api, people: People) -> None:
    key = people.developer.key
    once = {"Idempotency-Key": "secret-once"}
    answers = [await put(api, "once", {"value": "hunter2"}, key, **once) for _ in range(2)]
    assert [answer.json["version"] for answer in answers] == [1, 1]
    other = await put(api, "once", {"value": "other"}, key, **once)
    assert (other.status, other.error["code"]) == (409, "idempotency_key_reused")
    import hashlib

    guess = hashlib.sha256(b'PUT /api/v1/secrets/once\0{"value": "hunter2"}').digest()
    conn = await asyncpg.connect(api.database_url)
    try:
        kept = await conn.fetchval("select digest from kit.idempotency where key = 'secret-once'")
    finally:
        await conn.close()
    assert kept is not None
    assert kept != guess


async def test_a_value_is_in_no_table_and_in_no_log(api: Api, people: People) -> None:
    """As text, as bytes or in base64: after good and after refused requests."""
    key = people.developer.key
    value = f"{CANARY}-everywhere-0123456789"
    forms = {value.encode(), base64.b64encode(value.encode()), value.encode().hex().encode()}
    sealed = {"value_base64": base64.b64encode(value.encode()).decode()}
    assert (await put(api, "scan", {"value": value}, key, **{"Idempotency-Key": "scan-1"})).status == 200
    assert (await put(api, "scan", sealed, key)).status == 200
    for refused in ({"value": value, **sealed}, {"value": value, "more": value}, {"value": value + "x" * (64 << 10)}):
        answer = await put(api, "scan", refused, key)
        assert answer.status == 400
        assert not [form for form in forms if form in answer.content]
    create = {"sku": "g1.1", "secrets": [{"name": "scan", "env": "SCAN"}], "wait_s": 600}
    made = await api.call("POST", "/allocations", json=create, key=key)
    assert made.status == 201, made.content
    assert not [form for form in forms if form in made.content]
    tables = await _everything(api.database_url)
    assert b"scan" in tables
    assert not [form for form in forms if form in tables]
    log = api.log.read_bytes()
    assert not [form for form in forms if form in log]


async def _everything(database_url: str) -> bytes:
    """All rows of all tables of ours, with binary columns as bytes and as hexadecimal."""
    conn = await asyncpg.connect(database_url)
    try:
        names = await conn.fetch(
            "select format('%I.%I', schemaname, tablename) as name from pg_tables"
            " where schemaname not in ('pg_catalog', 'information_schema')"
        )
        rows = [row for name in names for row in await conn.fetch(f"select * from {name['name']}")]
        texts = [row for name in names for row in await conn.fetch(f"select t::text from {name['name']} t")]
    finally:
        await conn.close()
    raw = [value for row in rows for value in row.values() if isinstance(value, bytes)]
    assert len(names) > 20
    return b"\n".join([*raw, *(row[0].encode() for row in texts)])

"""The routes of the fleet, through the real edge and the real database."""

import dataclasses
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock

import httpx
import msgspec
import pytest

from integration.fleet.agent import new_key, request_for
from integration.fleet.conftest import Connect, Enrol, Holders
from penstock.fleet import slots
from penstock.fleet.enrolment import Enrolment
from penstock.fleet.routes import router
from penstock.fleet.tasks import Tasks
from penstock.kit import http, paging
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.kit.edge import Edge
from penstock.kit.errors import Unauthenticated
from penstock.kit.exchanges import Exchanges
from penstock.kit.ids import new_id
from penstock.node.layout import mps_shares
from penstock.wire.link import Welcome
from penstock.wire.tasks import HEALTH_PROBE, HealthProbe


class Keys:
    """Two known credentials."""

    def __init__(self, operator: Caller) -> None:
        self._known = {
            "Bearer operator": operator,
            "Bearer second": operator,
            "Bearer tenant": dataclasses.replace(operator, actions=frozenset({"allocations.create"}), operator=False),
        }

    async def authenticate(self, authorization: str | None, project: str | None) -> Caller:
        """Who it is."""
        caller = self._known.get(authorization or "")
        if caller is None:
            raise Unauthenticated("who are you?")
        return caller


@pytest.fixture
async def client(
    database: Database, enrolment: Enrolment, claims: Holders, operator: Caller
) -> AsyncIterator[httpx.AsyncClient]:
    """An operator's client."""
    app = Edge(http.application([router(enrolment, claims, database)], Keys(operator)), Exchanges(AsyncMock()))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app),  # pyright: ignore[reportArgumentType]
        base_url="http://test",
        headers={"Authorization": "Bearer operator"},
    ) as opened:
        yield opened


async def ask(client: httpx.AsyncClient, name: str = "n1", **headers: str) -> httpx.Response:
    return await client.post("/nodes/enrolment-tokens", json={"node_name": name}, headers=headers)


async def test_a_host_becomes_a_node_over_the_public_route(client: httpx.AsyncClient) -> None:
    answer = await ask(client)
    assert answer.status_code == 201
    body: dict[str, Any] = {
        "token": answer.json()["token"],
        "node_name": "n1",
        "csr_pem": request_for(new_key(), "n1"),
    }
    enrolled = await client.post("/enrolments", json=body, headers={"Authorization": ""})
    assert enrolled.status_code == 201
    assert enrolled.json()["node_id"] == answer.json()["node_id"]
    again = await client.post("/enrolments", json=body)
    assert (again.status_code, again.json()["error"]["code"]) == (401, "fleet.token_refused")
    node = (await client.get(f"/nodes/{answer.json()['node_id']}")).json()
    assert (node["state"], node["name"], node["gpus"]) == ("enrolled", "n1", [])
    assert node["certificate_expires_at"] is not None


async def test_a_repeated_request_shows_the_same_token_to_its_maker_only_and_keeps_it_sealed(
    client: httpx.AsyncClient, database: Database
) -> None:
    key = {"Idempotency-Key": "k1"}
    first = await ask(client, **key)
    assert (await ask(client, **key)).json() == first.json()
    other = await ask(client, **key, Authorization="Bearer second")
    assert (other.status_code, other.json()["error"]["code"]) == (409, "fleet.secret_shown_before")
    async with database.read() as conn:
        kept = await conn.fetchval("select response from kit.idempotency")
    assert first.json()["token"].encode() not in kept


BAD_TOKEN_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({}, "node_name"),
    ({"node_name": ""}, "node_name"),
    ({"node_name": "UPPER"}, "node_name"),
    ({"node_name": "x" * 64}, "node_name"),
    ({"node_name": "n1", "gpus_approved": -1}, "gpus_approved"),
    ({"node_name": "n1", "gpus_approved": 1025}, "gpus_approved"),
    ({"node_name": "n1", "admin": True}, "admin"),
]


async def test_a_bad_token_request_names_its_field(client: httpx.AsyncClient, database: Database) -> None:
    for body, field in BAD_TOKEN_REQUESTS:
        answer = await client.post("/nodes/enrolment-tokens", json=body)
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, field), body
    async with database.read() as conn:
        assert await conn.fetchval("select count(*) from fleet.nodes") == 0


async def test_nodes_are_listed_by_pages_and_states(client: httpx.AsyncClient, enrol: Enrol) -> None:
    names = [f"n{number}" for number in range(5)]
    for name in names:
        await enrol(name)
    await ask(client, "waiting")
    seen: list[str] = []
    cursor = ""
    while True:
        page = (await client.get("/nodes", params={"limit": 2} | ({"cursor": cursor} if cursor else {}))).json()
        seen += [node["name"] for node in page["items"]]
        if not (cursor := page["next_cursor"]):
            break
    assert seen == [*names, "waiting"]
    only = (await client.get("/nodes", params={"state": "pending"})).json()
    assert [node["name"] for node in only["items"]] == ["waiting"]


BAD_QUERIES = [
    ("/nodes?state=happy", "state"),
    ("/nodes?limit=0", "limit"),
    ("/nodes?cursor=rubbish", "cursor"),
    (f"/nodes?cursor={paging.encode_cursor()}", "cursor"),
    (f"/nodes?cursor={paging.encode_cursor('tasks', 1)}", "cursor"),
    (f"/nodes/nod_default/tasks?cursor={paging.encode_cursor('tasks', 'x')}", "cursor"),
    (f"/nodes/nod_default/tasks?cursor={paging.encode_cursor('tasks', 1 << 70)}", "cursor"),
]


async def test_a_bad_query_names_its_field(client: httpx.AsyncClient) -> None:
    for path, field in BAD_QUERIES:
        answer = await client.get(path)
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, field), path


async def test_tenants_may_do_nothing_with_nodes(client: httpx.AsyncClient, enrol: Enrol) -> None:
    node_id = (await enrol()).node_id
    orders = [f"/nodes/{node_id}/{order}" for order in ("cordon", "uncordon", "drain", "revoke", "retire")]
    calls: list[tuple[str, str, Any]] = [
        ("GET", "/nodes", None),
        ("GET", f"/nodes/{node_id}", None),
        ("GET", f"/nodes/{node_id}/tasks", None),
        ("POST", "/nodes/enrolment-tokens", {"node_name": "n2"}),
        ("POST", f"/nodes/{node_id}/recovery-tokens", None),
        *(("POST", order, {}) for order in orders),
        ("POST", f"/nodes/{node_id}/slots/{new_id('slt')}/force-cleanup", {"runtime_verified_absent": True}),
    ]
    for method, path, body in calls:
        for credential, status in (("tenant", 403), ("nobody", 401)):
            headers = {"Authorization": f"Bearer {credential}"}
            answer = await client.request(method, path, json=body, headers=headers)
            assert answer.status_code == status, (method, path, answer.text)


async def test_shares_are_slots_of_their_gpu(
    client: httpx.AsyncClient, enrol: Enrol, connect: Connect, claims: Holders
) -> None:
    node_id = (await enrol()).node_id
    agent = await connect()
    hello = agent.hello(2)
    shared, whole = hello.inventory.gpus
    listed = msgspec.structs.replace(hello.inventory, gpus=[*mps_shares(shared, 4), whole])
    await agent.send(msgspec.structs.replace(hello, inventory=listed))
    await agent.expect(Welcome)
    names = ("gpus_total", "gpus_free", "slots_total", "slots_free")
    node = (await client.get(f"/nodes/{node_id}")).json()
    assert [node[name] for name in names] == [2, 2, 5, 5]
    claims.held = {node["gpus"][0]["slot_id"]: "alc_1"}
    node = (await client.get("/nodes")).json()["items"][0]
    assert [node[name] for name in names] == [2, 1, 5, 4]


async def test_orders_show_the_node_as_it_is_now(
    client: httpx.AsyncClient, enrol: Enrol, connect: Connect, database: Database, claims: Holders
) -> None:
    node_id = (await enrol()).node_id
    await (await connect()).join(gpus=2)
    node = (await client.get(f"/nodes/{node_id}")).json()
    assert (node["state"], node["gpus_total"], node["gpus_free"], node["simulated"]) == ("ready", 2, 2, True)
    slot_id = node["gpus"][0]["slot_id"]
    claims.held = {slot_id: "alc_1"}
    assert (await client.get(f"/nodes/{node_id}")).json()["gpus_free"] == 1
    cordoned = await client.post(f"/nodes/{node_id}/cordon", json={"reason": "disk"})
    assert cordoned.status_code == 200
    assert (cordoned.json()["state"], cordoned.json()["state_reason"]) == ("cordoned", "disk")
    assert cordoned.json()["gpus_free"] == 0
    refused = await client.post(f"/nodes/{node_id}/retire", json={})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "fleet.node_in_use")
    claims.held = {}
    async with database.transaction() as tx:
        await slots.block(tx, [slot_id], "no proof")
    path = f"/nodes/{node_id}/slots/{slot_id}/force-cleanup"
    unseen = await client.post(path, json={"runtime_verified_absent": False})
    assert (unseen.status_code, unseen.json()["error"]["field"]) == (400, "runtime_verified_absent")
    cleaned = await client.post(path, json={"runtime_verified_absent": True, "reason": "looked"})
    assert (cleaned.status_code, cleaned.json()["health"]) == (200, "healthy")
    recovery = await client.post(f"/nodes/{node_id}/recovery-tokens")
    assert (recovery.status_code, recovery.json()["kind"]) == (201, "recover")
    revoked = await client.post(f"/nodes/{node_id}/revoke", json={})
    assert (revoked.json()["state"], revoked.json()["certificate_expires_at"]) == ("lost", None)


async def test_a_gpu_is_taken_out_and_asked_back_over_the_api(
    client: httpx.AsyncClient, enrol: Enrol, connect: Connect
) -> None:
    node_id = (await enrol()).node_id
    await (await connect()).join(gpus=2)
    slot_id = (await client.get(f"/nodes/{node_id}")).json()["gpus"][0]["slot_id"]
    path = f"/nodes/{node_id}/slots/{slot_id}"
    early = await client.post(f"{path}/return")
    assert (early.status_code, early.json()["error"]["code"]) == (409, "fleet.gpu_not_quarantined")
    long = await client.post(f"{path}/quarantine", json={"reason": "x" * 256})
    assert (long.status_code, long.json()["error"]["field"]) == (400, "reason")
    out = await client.post(f"{path}/quarantine", json={"reason": "loud"})
    assert (out.status_code, out.json()["health"], out.json()["readings"]) == (200, "quarantined", None)
    assert (out.json()["quarantine"]["cause"], out.json()["quarantine"]["detail"]) == ("operator", "loud")
    asked = await client.post(f"{path}/return")
    assert (asked.status_code, asked.json()["quarantine"]["probing"]) == (202, True)
    node = (await client.get(f"/nodes/{node_id}")).json()
    assert [gpu["health"] for gpu in node["gpus"]] == ["quarantined", "healthy"]
    absent = await client.post(f"/nodes/{node_id}/slots/slt_{'0' * 26}/quarantine", json={})
    assert absent.status_code == 404


async def test_tasks_are_listed_newest_first(
    client: httpx.AsyncClient, enrol: Enrol, database: Database, tasks: Tasks
) -> None:
    node_id = (await enrol()).node_id
    ids: list[str] = []
    for number in range(3):
        async with database.transaction() as tx:
            ids.append(
                await tasks.dispatch(
                    tx,
                    node_id=node_id,
                    type=HEALTH_PROBE,
                    allocation_id=None,
                    fence=0,
                    params=HealthProbe(),
                    dedupe_key=f"key{number}",
                    expires_s=60,
                )
            )
    first = (await client.get(f"/nodes/{node_id}/tasks", params={"limit": 2})).json()
    second = (await client.get(f"/nodes/{node_id}/tasks", params={"limit": 2, "cursor": first["next_cursor"]})).json()
    assert [task["id"] for task in first["items"] + second["items"]] == ids[::-1]
    assert second["next_cursor"] is None


async def test_an_unknown_node_is_absent_whatever_its_id_looks_like(client: httpx.AsyncClient) -> None:
    for node_id in ("nod_1", "rubbish", new_id("nod")):
        for path in (f"/nodes/{node_id}", f"/nodes/{node_id}/tasks"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert (await client.post(f"/nodes/{node_id}/cordon", json={})).status_code == 404

"""The routes of compute, through the real edge and the real database."""

from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from integration.compute.stage import ACTIONS, LIMITS, NoSecrets, OpenFunds, World, someone
from penstock.compute.routes import router
from penstock.kit import http
from penstock.kit.caller import Caller
from penstock.kit.db import Reader
from penstock.kit.edge import Edge
from penstock.kit.errors import Unauthenticated
from penstock.kit.ids import new_id

OWNER = someone()
KNOWN = {
    "Bearer owner": OWNER,
    "Bearer operator": replace(OWNER, operator=True),
    "Bearer viewer": replace(OWNER, role="viewer", actions=frozenset({"allocations.read", "skus.read"})),
    "Bearer stranger": someone(new_id("prj"), actions=ACTIONS),
}


class Keys:
    """A few known credentials."""

    async def authenticate(self, authorization: str | None, project: str | None) -> Caller:
        """Who it is."""
        if (caller := KNOWN.get(authorization or "")) is None:
            raise Unauthenticated("who are you?")
        return caller


class OneProject:
    """There is one project."""

    async def exists(self, conn: Reader, project_id: str) -> bool:
        """Whether it is that one."""
        return project_id == OWNER.project_id


@pytest.fixture
async def client(world: World) -> AsyncIterator[httpx.AsyncClient]:
    """The owner's client."""
    routes = router(
        OpenFunds(), NoSecrets(), world.handoffs, OneProject(), world.db, limits=LIMITS, gateway_url="http://gateway/"
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=Edge(http.application([routes], Keys()))),  # pyright: ignore[reportArgumentType]
        base_url="http://test",
        headers={"Authorization": "Bearer owner"},
    ) as opened:
        yield opened


def as_(who: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {who}"}


async def test_an_allocation_shows_its_gpus_its_timeline_and_where_its_ports_are(
    world: World, client: httpx.AsyncClient
) -> None:
    node_id = await world.add_node(2)
    body = {"sku": "g1.1", "gpus": 2, "name": "mine", "labels": {"a": "1"}, "ports": [8000]}
    made = (await client.post("/allocations", json=body)).json()
    assert (made["state"], made["node_id"], made["name"]) == ("requested", node_id, "mine")
    assert len(made["gpu_uuids"]) == 2
    assert made["simulated"] is True
    assert made["access_urls"] == {"8000": f"http://gateway/u/{made['id']}/8000/"}
    seen = (await client.get(f"/allocations/{made['id']}")).json()
    assert seen == made
    assert [move["state"] for move in seen["timeline"]] == ["requested"]


async def test_refusals_name_their_reason(world: World, client: httpx.AsyncClient) -> None:
    await world.add_node(1)
    for body, status, code in [
        ({"gpus": 9223372036854775808}, 400, "compute.bad_gpu_count"),
        ({"gpus": 0}, 400, "compute.bad_gpu_count"),
        ({"sku": "no"}, 400, "compute.unknown_sku"),
        ({"image": "evil@sha256:short"}, 400, "compute.bad_digest"),
        ({"env": {"LD_PRELOAD": "x"}}, 400, "compute.reserved_env"),
        ({"env": {"NVIDIA_DRIVER_CAPABILITIES": "x"}}, 400, "compute.reserved_env"),
        ({"gpus": 2}, 429, "compute.out_of_capacity"),
        ({"gpus": 1.5}, 400, "invalid_request"),
    ]:
        answer = await client.post("/allocations", json={"sku": "g1.1"} | body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    big = (await client.post("/allocations", json={"sku": "g1.1", "gpus": 9223372036854775808})).json()
    assert big["error"]["field"] == "gpus"
    assert "1, 2, 4, 8" in big["error"]["message"]
    viewer = await client.post("/allocations", json={"sku": "g1.1"}, headers=as_("viewer"))
    assert (viewer.status_code, viewer.json()["error"]["code"]) == (403, "compute.policy")
    assert await world.value("select count(*) from compute.allocations") == 0


async def test_the_same_key_makes_one_allocation(world: World, client: httpx.AsyncClient) -> None:
    await world.add_node(4)
    headers = {"Idempotency-Key": "k1"}
    answers = [await client.post("/allocations", json={"sku": "g1.1"}, headers=headers) for _ in range(3)]
    assert {answer.content for answer in answers} == {answers[0].content}
    assert await world.value("select count(*) from compute.allocations") == 1
    other = await client.post("/allocations", json={"sku": "g1.1", "gpus": 2}, headers=headers)
    assert other.status_code == 409


async def test_strangers_see_nothing_and_viewers_change_nothing(world: World, client: httpx.AsyncClient) -> None:
    await world.add_node(2)
    made = (await client.post("/allocations", json={"sku": "g1.1"})).json()
    path, unknown = f"/allocations/{made['id']}", f"/allocations/{new_id('alc')}"
    for method, suffix, body in [("GET", "", None), ("PATCH", "", {"name": "x"}), ("POST", "/release", {})]:
        there = await client.request(method, path + suffix, json=body, headers=as_("stranger"))
        absent = await client.request(method, unknown + suffix, json=body, headers=as_("stranger"))
        assert there.status_code == absent.status_code == 404
        assert there.json()["error"]["message"] == absent.json()["error"]["message"]
    assert (await client.get("/allocations", headers=as_("stranger"))).json()["items"] == []
    for method, suffix, body in [("PATCH", "", {"name": "x"}), ("POST", "/release", {})]:
        assert (await client.request(method, path + suffix, json=body, headers=as_("viewer"))).status_code == 403
    assert (await client.get(path, headers=as_("viewer"))).status_code == 200
    assert (await client.get(path, headers={"Authorization": ""})).status_code == 401
    assert (await client.get("/allocations/nonsense")).status_code == 404


async def test_lists_are_filtered_and_paged(world: World, client: httpx.AsyncClient) -> None:
    await world.add_node(8)
    ids = []
    for n in range(5):
        body = {"sku": "g1.1", "name": f"n{n}", "labels": {"parity": str(n % 2), "all": "yes"}}
        ids.append((await client.post("/allocations", json=body)).json()["id"])
    first = (await client.get("/allocations", params={"limit": 2})).json()
    assert [item["id"] for item in first["items"]] == ids[:2:-1]
    rest = (await client.get("/allocations", params={"limit": 10, "cursor": first["next_cursor"]})).json()
    assert [item["id"] for item in rest["items"]] == ids[2::-1]
    assert rest["next_cursor"] is None

    async def names(**params: object) -> list[str]:
        found = (await client.get("/allocations", params=params)).json()  # pyright: ignore[reportArgumentType]
        return [item["name"] for item in found["items"]]

    assert await names(label="parity=1") == ["n3", "n1"]
    assert await names(label=["parity=0", "all=yes"]) == ["n4", "n2", "n0"]
    assert await names(name="n2") == ["n2"]
    assert await names(state="active") == []
    assert len(await names(state="requested", sku="g1.1")) == 5
    for params in ({"state": "odd"}, {"label": "noequals"}, {"cursor": first["next_cursor"] + "x"}, {"limit": 201}):
        assert (await client.get("/allocations", params=params)).status_code == 400, params


async def test_name_and_labels_may_change_and_nothing_else(world: World, client: httpx.AsyncClient) -> None:
    await world.add_node(1)
    made = (await client.post("/allocations", json={"sku": "g1.1"})).json()
    path = f"/allocations/{made['id']}"
    changed = (await client.patch(path, json={"name": "new", "labels": {"a": "b"}})).json()
    assert (changed["name"], changed["labels"], changed["version"]) == ("new", {"a": "b"}, 2)
    assert (await client.patch(path, json={"state": "active"})).status_code == 400
    assert (await client.patch(path, json={"tenant_id": "x"})).status_code == 400
    assert await world.facts(made["id"]) == [(1, "provisioning.requested"), (2, "provisioning.updated")]


async def test_release_answers_the_new_state_and_may_be_repeated(world: World, client: httpx.AsyncClient) -> None:
    await world.add_node(1)
    made = (await client.post("/allocations", json={"sku": "g1.1"})).json()
    path = f"/allocations/{made['id']}/release"
    first = await client.post(path, json={"reason": "done"})
    assert (first.status_code, first.json()["state"], first.json()["reason"]) == (200, "releasing", "done")
    again = await client.post(path, json={})
    assert again.json()["version"] == first.json()["version"]


async def test_skus_are_public_and_written_by_operators(world: World, client: httpx.AsyncClient) -> None:
    await world.add_node(3)
    listed = (await client.get("/skus")).json()["items"]
    assert [(sku["name"], sku["gpu_counts"], sku["gpus_free"]) for sku in listed] == [("g1.1", [1, 2, 4, 8], 3)]
    assert listed[0]["price_microusd_per_gpu_hour"] == 3_490_000
    body = {
        "description": "big",
        "gpu_model": "sim-2",
        "gpu_counts": [8, 1],
        "price_microusd_per_gpu_hour": 1,
        "memory_bytes_per_gpu": 1 << 30,
        "cpus_per_gpu": 1,
    }
    assert (await client.put("/skus/g2", json=body)).status_code == 403
    made = await client.put("/skus/g2", json=body, headers=as_("operator"))
    assert (made.status_code, made.json()["gpu_counts"], made.json()["gpus_free"]) == (200, [1, 8], 0)
    assert (await client.get("/skus/g2")).json() == made.json()
    assert (await client.get("/skus/none")).status_code == 404
    assert (await client.put("/skus/BAD", json=body, headers=as_("operator"))).status_code == 400


async def test_quotas_are_seen_by_their_project_and_set_by_operators(world: World, client: httpx.AsyncClient) -> None:
    await world.add_node(2)
    await client.post("/allocations", json={"sku": "g1.1"})
    path = "/projects/prj_default/quota"
    expected = {"project_id": "prj_default", "gpus_max": 64, "gpus_used": 1}
    assert (await client.get(path)).json() == expected
    assert (await client.get(path, headers=as_("stranger"))).status_code == 404
    assert (await client.put(path, json={"gpus_max": 1})).status_code == 403
    put = await client.put(path, json={"gpus_max": 1}, headers=as_("operator"))
    assert put.json() == expected | {"gpus_max": 1}
    over = await client.post("/allocations", json={"sku": "g1.1"})
    assert (over.status_code, over.json()["error"]["code"]) == (429, "compute.quota_exceeded")
    unknown = f"/projects/{new_id('prj')}/quota"
    assert (await client.put(unknown, json={"gpus_max": 1}, headers=as_("operator"))).status_code == 404
    assert (await client.get(unknown, headers=as_("operator"))).status_code == 404

"""The routes of compute, through the real edge and the real database."""

from collections.abc import AsyncIterator
from dataclasses import replace
from unittest.mock import AsyncMock

import httpx
import pytest

from integration.compute.stage import ACTIONS, LIMITS, NoSecrets, OpenFunds, World, someone
from penstock.compute.routes import router
from penstock.kit import http
from penstock.kit.caller import Caller
from penstock.kit.db import Reader
from penstock.kit.edge import Edge
from penstock.kit.errors import Unauthenticated
from penstock.kit.exchanges import Exchanges
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


class OneFunction:
    """One function needs the offer `f1`."""

    async def of_sku(self, conn: Reader, sku: str, *, limit: int) -> list[str]:
        """That function."""
        return ["function hello in project prj_x"] if sku == "f1" else []

    async def of_runtime(self, conn: Reader, project_id: str, runtime: str, *, limit: int) -> list[str]:
        """No function."""
        return []


@pytest.fixture
async def client(world: World) -> AsyncIterator[httpx.AsyncClient]:
    """The owner's client."""
    routes = router(
        OpenFunds(),
        NoSecrets(),
        world.handoffs,
        OneProject(),
        OneFunction(),
        world.db,
        limits=LIMITS,
        gateway_url="http://gateway/",
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=Edge(http.application([routes], Keys()), Exchanges(AsyncMock()))),  # pyright: ignore[reportArgumentType]
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
        told = [answer.json()["error"]["message"] for answer in (there, absent)]
        assert told == [f"no allocation {wanted.rpartition('/')[2]}" for wanted in (path, unknown)]
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


async def test_a_client_may_choose_the_id(world: World, client: httpx.AsyncClient) -> None:
    await world.add_node(4)
    chosen = new_id("alc")
    body = {"sku": "g1.1", "id": chosen}
    key = {"Idempotency-Key": "k1"}
    for _ in range(2):
        assert (await client.post("/allocations", json=body, headers=key)).json()["id"] == chosen
    taken = await client.post("/allocations", json=body, headers={"Idempotency-Key": "k2"})
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "compute.id_taken")
    for bad in ("alc_default", "nod_" + chosen[4:], "alc_" + "0" * 26, "alc_" + "z" * 26, chosen + "\n"):
        refused = await client.post("/allocations", json={"sku": "g1.1", "id": bad})
        assert (refused.status_code, refused.json()["error"]["field"]) == (400, "id"), bad


async def test_a_list_may_leave_out_what_has_ended(world: World, client: httpx.AsyncClient) -> None:
    await world.add_node(4)
    kept, gone = [(await client.post("/allocations", json={"sku": "g1.1"})).json()["id"] for _ in range(2)]
    async with world.db.transaction() as tx:
        await tx.execute(
            "update compute.allocations set state = 'released', ended_at = now(), deadline_at = null where id = $1",
            gone,
        )
    listed = {
        ended: [item["id"] for item in (await client.get(f"/allocations{ended}")).json()["items"]]
        for ended in ("", "?ended=false", "?ended=true")
    }
    assert listed == {"": [gone, kept], "?ended=false": [kept], "?ended=true": [gone]}


async def test_a_sku_changes_in_one_thing_and_goes_when_nothing_needs_it(
    world: World, client: httpx.AsyncClient
) -> None:
    await world.add_node(4)
    boss = as_("operator")
    before = (await client.get("/skus/g1.1")).json()
    changed = await client.patch("/skus/g1.1", json={"price_microusd_per_gpu_hour": 5}, headers=boss)
    assert changed.json() == before | {"price_microusd_per_gpu_hour": 5}
    assert (await client.patch("/skus/g1.1", json={"mig_profile": "1g.10gb"}, headers=boss)).status_code == 400
    assert (await client.patch("/skus/g1.1", json={})).status_code == 403
    made = (await client.post("/allocations", json={"sku": "g1.1"})).json()["id"]
    refused = await client.delete("/skus/g1.1", headers=boss)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "compute.sku_in_use")
    assert f"in use by allocation {made}" in refused.json()["error"]["message"]
    put = {name: before[name] for name in ("description", "gpu_model", "gpu_counts", "cpus_per_gpu")}
    put |= {"price_microusd_per_gpu_hour": 1, "memory_bytes_per_gpu": before["memory_bytes_per_gpu"]}
    for name in ("f1", "free"):
        assert (await client.put(f"/skus/{name}", json=put, headers=boss)).status_code == 200
    refused = await client.delete("/skus/f1", headers=boss)
    assert "in use by function hello in project prj_x" in refused.json()["error"]["message"]
    assert (await client.delete("/skus/free")).status_code == 403
    assert (await client.delete("/skus/free", headers=boss)).status_code == 204
    gone = await client.delete("/skus/free", headers=boss)
    assert gone.status_code == 404
    assert gone.json()["error"]["message"] == "there is no SKU free; there are f1, g1.1"


async def test_a_refusal_names_the_thing(world: World, client: httpx.AsyncClient) -> None:
    refused = await client.post("/allocations", json={"sku": "h100"})
    assert refused.json()["error"]["message"] == "there is no SKU h100; there are g1.1"
    unknown = new_id("alc")
    for answer in (
        await client.get(f"/allocations/{unknown}"),
        await client.patch(f"/allocations/{unknown}", json={}),
        await client.post(f"/allocations/{unknown}/release", json={}),
    ):
        assert (answer.status_code, answer.json()["error"]["message"]) == (404, f"no allocation {unknown}")
    assert (await client.get("/allocations/train")).json()["error"]["message"] == "no allocation train"
    long = (await client.get("/allocations/" + "x" * 500)).json()["error"]["message"]
    assert long == "no allocation " + "x" * 99 + "…"

"""Budgets over the running api: set, shown, changed and deleted, by whom they may be, and what creates meet."""

from typing import Any

import asyncpg
import pytest

from .conftest import Api, People

PATH = "/billing/budgets"


async def put(api: Api, key: str, **body: Any) -> Any:
    return await api.call("PUT", PATH, json={"period": "monthly", "limit_microusd": 20_000_000, **body}, key=key)


async def test_a_budget_is_set_shown_changed_and_deleted(api: Api, people: People) -> None:
    key = people.admin.key
    made = await put(api, key)
    assert made.status == 200, made.content
    budget = made.json
    assert (budget["project_id"], budget["key_id"], budget["action"]) == (people.admin.project_id, None, "reject")
    assert (budget["spent_microusd"], budget["remaining_microusd"]) == (0, 20_000_000)
    assert budget["period_start"] < budget["resets_at"]
    assert budget["period_start"].endswith("-01T00:00:00Z")
    changed = await put(api, key, limit_microusd=5, action="warn")
    assert (changed.json["id"], changed.json["limit_microusd"], changed.json["action"]) == (budget["id"], 5, "warn")
    of_key = await put(api, key, key_id=people.developer.key_id)
    assert of_key.json["key_id"] == people.developer.key_id
    assert of_key.json["id"] != budget["id"]
    listed = await api.call("GET", f"{PATH}?limit=200", key=people.viewer.key)
    assert {budget["id"], of_key.json["id"]} <= {each["id"] for each in listed.json["items"]}
    shown = await api.call("GET", f"{PATH}/{budget['id']}", key=people.viewer.key)
    assert shown.json["limit_microusd"] == 5
    for made_id in (budget["id"], of_key.json["id"]):
        assert (await api.call("DELETE", f"{PATH}/{made_id}", key=key)).status == 204
        for method in ("GET", "DELETE"):
            assert (await api.call(method, f"{PATH}/{made_id}", key=key)).status == 404
    conn = await asyncpg.connect(api.database_url)
    try:
        rows = await conn.fetch("select action from kit.audit where target_id = $1 order by at", budget["id"])
    finally:
        await conn.close()
    assert [row["action"] for row in rows] == ["budgets.write", "budgets.write", "budgets.delete"]


async def test_lists_have_pages(api: Api, people: People) -> None:
    for period in ("hourly", "daily", "monthly"):
        assert (await put(api, people.sister.key, period=period, action="warn")).status == 200
    found: list[str] = []
    cursor = ""
    while True:
        page = (await api.call("GET", f"{PATH}?limit=2{cursor}", key=people.sister.key)).json
        found += [each["period"] for each in page["items"]]
        if not page["next_cursor"]:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert found == ["hourly", "daily", "monthly"]
    wrong = await api.call("GET", f"{PATH}?cursor=nonsense", key=people.sister.key)
    assert (wrong.status, wrong.error["field"]) == (400, "cursor")


async def test_only_those_who_may_set_a_budget(api: Api, people: People) -> None:
    for who in (people.viewer, people.developer):
        assert (await put(api, who.key)).status == 403
    theirs = await put(api, people.sister.key, action="warn")
    for method in ("GET", "DELETE"):
        assert (await api.call(method, f"{PATH}/{theirs.json['id']}", key=people.owner.key)).status == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"limit_microusd": -1}, "limit_microusd"),
        ({"limit_microusd": 10**12 + 1}, "limit_microusd"),
        ({"limit_microusd": 1.5}, "limit_microusd"),
        ({"limit_microusd": None}, "limit_microusd"),
        ({"period": "yearly"}, "period"),
        ({"action": "explode"}, "action"),
        ({"key_id": "nonsense"}, "key_id"),
        ({"key_id": "key_" + "0" * 26}, "key_id"),
        ({"key_id": "sister"}, "key_id"),
        ({"key_id": "revoked"}, "key_id"),
        ({"key_id": ""}, "key_id"),
        ({"extra": 1}, "extra"),
    ],
)
async def test_bad_input_is_refused_by_field(api: Api, people: People, body: dict[str, Any], field: str) -> None:
    named = {"sister": people.sister.key_id, "revoked": people.revoked.key_id}
    sent = {**body, "key_id": named.get(body["key_id"], body["key_id"])} if "key_id" in body else body
    answer = await put(api, people.owner.key, period=sent.pop("period", "daily"), **sent)
    assert (answer.status, answer.error["field"]) == (400, field), answer.content
    listed = await api.call("GET", f"{PATH}?limit=200", key=people.owner.key)
    assert not [each for each in listed.json["items"] if each["action"] == "reject"]


async def test_a_create_without_room_is_refused_by_name(api: Api, people: People) -> None:
    key = people.sister.key
    budget = await put(api, key, period="hourly", limit_microusd=100, action="reject")
    refused = await api.call("POST", "/allocations", json={"sku": "g1.1", "wait_s": 600}, key=key)
    assert (refused.status, refused.error["code"]) == (429, "billing.budget_exhausted"), refused.content
    assert budget.json["id"] in refused.error["message"]
    assert "has $0.0001 left: $0.00 of $0.0001 is spent" in refused.error["message"]
    await put(api, key, period="hourly", limit_microusd=100, action="warn")
    made = await api.call("POST", "/allocations", json={"sku": "g1.1", "wait_s": 600}, key=key)
    assert made.status == 201, made.content


async def test_one_key_one_effect(api: Api, people: People) -> None:
    body = {"period": "daily", "limit_microusd": 7, "action": "warn"}
    once = {"Idempotency-Key": "budget-once"}
    answers = [await api.call("PUT", PATH, json=body, key=people.sister.key, headers=once) for _ in range(2)]
    assert answers[0].content == answers[1].content
    other = await api.call("PUT", PATH, json={**body, "limit_microusd": 8}, key=people.sister.key, headers=once)
    assert (other.status, other.error["code"]) == (409, "idempotency_key_reused")

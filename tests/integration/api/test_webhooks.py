"""Webhooks over the running api: made, changed, paused, exchanged and deleted, by whom they may be."""

from typing import Any

import pytest

from .conftest import Answer, Api, People

URL = "https://8.8.8.8/hook"


async def make(api: Api, key: str, **headers: str) -> dict[str, Any]:
    answer = await api.call("POST", "/webhooks", json={"url": URL, "event_types": ["*"]}, key=key, headers=headers)
    assert answer.status == 201, answer.content
    return answer.json


async def test_a_webhook_is_made_shown_changed_and_deleted(api: Api, people: People) -> None:
    key = people.admin.key
    made = await make(api, key)
    assert made["secret"].startswith("whs_")
    path = f"/webhooks/{made['webhook']['id']}"
    shown = (await api.call("GET", path, key=people.viewer.key)).json
    assert shown == made["webhook"]
    assert (shown["state"], shown["reason"], shown["failures"]) == ("active", "", 0)
    listed = await api.call("GET", "/webhooks", key=people.viewer.key)
    assert shown in listed.json["items"]
    assert made["secret"].encode() not in listed.content
    changed = await api.call(
        "PATCH", path, key=key, json={"url": "https://1.1.1.1:8443/x", "event_types": ["provisioning.*"]}
    )
    assert (changed.status, changed.json["url"]) == (200, "https://1.1.1.1:8443/x")
    paused = await api.call("PATCH", path, key=key, json={"enabled": False})
    assert (paused.json["state"], paused.json["reason"]) == ("paused", "paused by its owner")
    assert (await api.call("PATCH", path, key=key, json={"enabled": False})).json["state"] == "paused"
    resumed = await api.call("PATCH", path, key=key, json={"enabled": True})
    assert (resumed.json["state"], resumed.json["reason"]) == ("active", "")
    assert (await api.call("DELETE", path, key=key)).status == 204
    for method in ("GET", "DELETE"):
        assert (await api.call(method, path, key=key)).status == 404
    events = (await api.call("GET", f"/events?aggregate_id={shown['id']}", key=key)).json["items"]
    assert [each["event_type"].removeprefix("notices.webhook_") for each in events] == [
        "created",
        "updated",
        "paused",
        "resumed",
        "deleted",
    ]
    audit = (await api.call("GET", f"/audit?target_id={shown['id']}", key=key)).json["items"]
    assert {each["action"] for each in audit} == {"webhooks.create", "webhooks.update", "webhooks.delete"}


async def test_a_repeated_create_makes_one_and_tells_its_secret_only_to_who_made_it(api: Api, people: People) -> None:
    once = {"Idempotency-Key": "webhook-once"}
    first, again = await make(api, people.admin.key, **once), await make(api, people.admin.key, **once)
    assert first == again
    other = await api.call("PATCH", f"/webhooks/{first['webhook']['id']}", key=people.developer.key, json={})
    assert other.status == 403
    await api.call("DELETE", f"/webhooks/{first['webhook']['id']}", key=people.admin.key)


async def test_a_rotation_shows_a_new_secret_and_how_long_the_old_one_lasts(api: Api, people: People) -> None:
    made = await make(api, people.admin.key)
    path = f"/webhooks/{made['webhook']['id']}"
    rotated = await api.call("POST", f"{path}/rotate", key=people.admin.key)
    assert rotated.status == 200, rotated.content
    assert rotated.json["secret"] != made["secret"]
    assert rotated.json["webhook"]["old_secret_until"] is not None
    await api.call("DELETE", path, key=people.admin.key)


async def test_a_test_event_waits_to_be_delivered_and_can_be_retried(api: Api, people: People) -> None:
    key = people.admin.key
    made = await make(api, key)
    path = f"/webhooks/{made['webhook']['id']}"
    sent = [(await api.call("POST", f"{path}/test", key=key)).json for _ in range(10)]
    assert {each["event_type"] for each in sent} == {"notices.test"}
    refused = await api.call("POST", f"{path}/test", key=key)
    assert (refused.status, refused.error["code"]) == (429, "notices.too_many_tests")
    found: list[str] = []
    cursor = ""
    while True:
        page = (await api.call("GET", f"{path}/deliveries?limit=4{cursor}", key=key)).json
        found += [each["id"] for each in page["items"]]
        if not page["next_cursor"]:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert found == [each["id"] for each in reversed(sent)]
    retried = await api.call("POST", f"{path}/deliveries/{found[0]}/retry", key=key)
    assert (retried.status, retried.json["state"]) == (201, "pending")
    assert (await api.call("GET", f"{path}/deliveries?state=failed", key=key)).json["items"] == []
    lost = await api.call("GET", f"{path}/deliveries?state=lost", key=key)
    assert (lost.status, lost.error["field"]) == (400, "state")
    unknown = await api.call("POST", f"{path}/deliveries/dlv_{'0' * 26}/retry", key=key)
    assert unknown.status == 404
    assert (await api.call("PATCH", path, key=key, json={"enabled": False})).status == 200
    for order in (f"{path}/test", f"{path}/deliveries/{found[0]}/retry"):
        paused = await api.call("POST", order, key=key)
        assert (paused.status, paused.error["code"]) == (409, "notices.webhook_paused")
    await api.call("DELETE", path, key=key)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"url": URL, "event_types": []}, "event_types"),
        ({"url": URL, "event_types": ["provisioning.actve"]}, "event_types"),
        ({"url": URL, "event_types": ["provisioning"]}, "event_types"),
        ({"url": URL, "event_types": ["*.active"]}, "event_types"),
        ({"url": URL, "event_types": ["provisioning.active"] * 51}, "event_types"),
        ({"url": URL, "event_types": "provisioning.active"}, "event_types"),
        ({"url": URL, "event": ["*"]}, "event"),
        ({"url": None}, "url"),
        ({}, "url"),
    ],
)
async def test_what_is_wrong_is_named(api: Api, people: People, body: dict[str, Any], field: str) -> None:
    answer = await api.call("POST", "/webhooks", json=body, key=people.admin.key)
    assert answer.status == 400, answer.content
    assert answer.error["field"].startswith(field)


async def test_developers_and_viewers_look_only(api: Api, people: People) -> None:
    for key in (people.developer.key, people.viewer.key):
        refused: Answer = await api.call("POST", "/webhooks", json={"url": URL}, key=key)
        assert (refused.status, refused.error["code"]) == (403, "permission_denied")
        assert (await api.call("GET", "/webhooks", key=key)).status == 200


async def test_a_project_has_at_most_twenty(api: Api, people: People) -> None:
    key = people.stranger.key
    made = [await make(api, key) for _ in range(20)]
    refused = await api.call("POST", "/webhooks", json={"url": URL}, key=key)
    assert (refused.status, refused.error["code"]) == (429, "notices.too_many_webhooks")
    page = (await api.call("GET", "/webhooks?limit=15", key=key)).json
    rest = (await api.call("GET", f"/webhooks?limit=15&cursor={page['next_cursor']}", key=key)).json
    assert [each["id"] for each in (*page["items"], *rest["items"])] == [each["webhook"]["id"] for each in made]
    for each in made:
        assert (await api.call("DELETE", f"/webhooks/{each['webhook']['id']}", key=key)).status == 204

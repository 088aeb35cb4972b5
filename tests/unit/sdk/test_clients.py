"""Both clients against a real server that behaves as badly as a server can."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import uvloop
from aiohttp import web

import scripted_api
from penstock.kit.ids import new_id
from penstock.sdk import errors, protocol
from penstock.sdk.client import AsyncClient, Client
from scripted_api import ScriptedApi, error_answer, hang_up, json_answer, text_answer

KEY = "psk_test"
WHOAMI = {
    "principal_id": "usr_default",
    "principal_kind": "user",
    "display_name": "admin",
    "organisation_id": "org_default",
    "project_id": "prj_default",
    "role": "owner",
    "operator": True,
    "key_id": None,
    "gateway_url": "http://gateway.example",
}
PROJECT = {"id": "prj_default", "organisation_id": "org_default", "name": "p", "created_at": "2026-01-01T00:00:00Z"}
#: Makes one call, blocking or not, and returns its value.
Ask = Callable[..., Any]


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with scripted_api.serve() as running:
        yield running


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_BACKOFF_FIRST_S", 0.01)


@pytest.fixture(params=["blocking", "asynchronous"])
def ask(request: pytest.FixtureRequest) -> Ask:
    def blocking(url: str, call: Callable[[Any], Any], **options: Any) -> Any:
        with Client(url, KEY, **options) as client:
            value = call(client)
            return list(value) if hasattr(value, "__next__") else value

    async def awaited(url: str, call: Callable[[Any], Any], options: dict[str, Any]) -> Any:
        async with AsyncClient(url, KEY, **options) as client:
            value = call(client)
            return [item async for item in value] if hasattr(value, "__anext__") else await value

    def asynchronous(url: str, call: Callable[[Any], Any], **options: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: asyncio.run(awaited(url, call, options))).result()

    return blocking if request.param == "blocking" else asynchronous


def whoami(client: Any) -> Any:
    return client.whoami()


def test_an_answer_is_typed_and_the_request_carries_key_and_project(api: ScriptedApi, ask: Ask) -> None:
    api.on("GET", "/whoami", json_answer(WHOAMI | {"a_later_field": 1}))
    assert ask(api.url + "/api/v1/", whoami, project="prj_default").operator is True
    assert api.seen[0].headers["authorization"] == f"Bearer {KEY}"
    assert api.seen[0].headers["penstock-project"] == "prj_default"


def test_the_asynchronous_client_works_in_uvloop_too(api: ScriptedApi) -> None:
    api.on("GET", "/whoami", json_answer(WHOAMI))

    async def twice() -> list[bool]:
        async with AsyncClient(api.url, KEY) as client:
            return [(await client.whoami()).operator for _ in range(2)]

    def run() -> list[bool]:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(twice())

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run).result() == [True, True]


def test_a_refusal_is_a_typed_error(api: ScriptedApi, ask: Ask) -> None:
    api.on("POST", "/projects", error_answer(400, "invalid_request", "name: max 63", "name"))
    with pytest.raises(errors.InvalidRequest) as caught:
        ask(api.url, lambda client: client.projects.create("x"))
    error = caught.value
    found = (error.code, error.message, error.field, error.correlation_id, error.status)
    assert found == ("invalid_request", "name: max 63", "name", "cor_test", 400)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, errors.Unauthenticated),
        (403, errors.Denied),
        (404, errors.NotFound),
        (409, errors.Conflict),
        (412, errors.Conflict),
        (429, errors.Exhausted),
        (500, errors.ServerError),
    ],
)
def test_each_status_has_its_error(api: ScriptedApi, ask: Ask, status: int, kind: type[Exception]) -> None:
    api.on("GET", "/whoami", error_answer(status, "code", "message"))
    with pytest.raises(kind):
        ask(api.url, whoami)
    assert api.count("GET", "/whoami") == 1


def test_a_create_is_repeated_under_one_idempotency_key(api: ScriptedApi, ask: Ask) -> None:
    api.on(
        "POST",
        "/projects",
        hang_up,
        error_answer(503, "unavailable", "later"),
        error_answer(409, "in_progress", "still running"),
        json_answer(PROJECT, 201),
    )
    assert ask(api.url, lambda client: client.projects.create("p")).id == "prj_default"
    keys = {seen.headers["idempotency-key"] for seen in api.seen}
    assert len(api.seen) == 4
    assert len(keys) == 1


def test_two_creates_have_two_keys(api: ScriptedApi, ask: Ask) -> None:
    api.on("POST", "/projects", json_answer(PROJECT, 201))
    ask(api.url, lambda client: client.projects.create("p"))
    ask(api.url, lambda client: client.projects.create("p"))
    assert len({seen.headers["idempotency-key"] for seen in api.seen}) == 2


def test_repeating_is_bounded(api: ScriptedApi, ask: Ask) -> None:
    api.on("GET", "/whoami", error_answer(503, "unavailable", "later"))
    with pytest.raises(errors.ServerError):
        ask(api.url, whoami)
    assert api.count("GET", "/whoami") == protocol.ATTEMPTS_MAX


def test_what_has_two_effects_when_done_twice_is_not_repeated(api: ScriptedApi, ask: Ask) -> None:
    key_id = new_id("key")
    api.on("DELETE", f"/keys/{key_id}", hang_up)
    with pytest.raises(errors.Unreachable):
        ask(api.url, lambda client: client.keys.revoke(key_id))
    assert api.count("DELETE", f"/keys/{key_id}") == 1


def test_a_list_is_read_to_its_end(api: ScriptedApi, ask: Ask) -> None:
    pages = [
        {"items": [PROJECT, PROJECT], "next_cursor": "two"},
        {"items": [], "next_cursor": "three"},
        {"items": [PROJECT], "next_cursor": None},
    ]
    api.on("GET", "/projects", *map(json_answer, pages))
    assert len(ask(api.url, lambda client: client.projects.list())) == 3
    assert [seen.query.get("cursor") for seen in api.seen] == [None, "two", "three"]


def test_a_limit_ends_a_list_early(api: ScriptedApi, ask: Ask) -> None:
    api.on("GET", "/projects", json_answer({"items": [PROJECT, PROJECT], "next_cursor": "more"}))
    assert len(ask(api.url, lambda client: client.projects.list(limit=4))) == 4
    assert [seen.query["limit"] for seen in api.seen] == ["4", "2"]


def test_labels_are_asked_for_one_by_one(api: ScriptedApi, ask: Ask) -> None:
    api.on("GET", "/allocations", json_answer({"items": [], "next_cursor": None}))
    ask(api.url, lambda client: client.allocations.list(labels={"a": "1&2", "b": "x"}))
    assert api.seen[0].query["label"] == "a=1&2"


@pytest.mark.parametrize(
    "bad", ["", "alc_1", "../../whoami", "prj_default", "alc_" + "0" * 25 + "/", "alc_" + "u" * 26]
)
def test_a_malformed_id_never_leaves_the_client(api: ScriptedApi, ask: Ask, bad: str) -> None:
    with pytest.raises(errors.InvalidArgument):
        ask(api.url, lambda client: client.allocations.get(bad))
    assert api.seen == []


@pytest.mark.parametrize("name", ["\ud800", object()])
def test_what_json_cannot_hold_is_an_error_of_ours(api: ScriptedApi, ask: Ask, name: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="cannot be sent as JSON"):
        ask(api.url, lambda client: client.projects.create(name))
    assert api.seen == []


def test_html_is_not_json(api: ScriptedApi, ask: Ask) -> None:
    api.on("GET", "/whoami", text_answer("<html>" + "x" * 500))
    with pytest.raises(errors.BadAnswer, match="is not JSON: '<html>x") as caught:
        ask(api.url, whoami)
    assert len(caught.value.message) < 150


def test_another_shape_is_named(api: ScriptedApi, ask: Ask) -> None:
    api.on("GET", "/whoami", json_answer({"principal_id": 1}))
    with pytest.raises(errors.BadAnswer, match="shape"):
        ask(api.url, whoami)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(api: ScriptedApi, ask: Ask, status: int) -> None:
    with scripted_api.serve() as other:
        api.on("GET", "/whoami", text_answer("", status, Location=f"{other.url}/api/v1/whoami"))
        with pytest.raises(errors.BadAnswer, match="redirects to"):
            ask(api.url, whoami)
        assert other.seen == []
        assert len(api.seen) == 1


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"[" * (1 << 20))


def test_an_endless_answer_stops_at_the_cap(api: ScriptedApi, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.sdk.http1.ANSWER_BYTES_MAX", 8 << 20)
    api.on("GET", "/whoami", endless)
    with pytest.raises(errors.BadAnswer, match="larger than 8 MB"):
        ask(api.url, whoami)


async def drip(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.05)


def test_a_server_that_drips_is_cut_off(api: ScriptedApi, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "ATTEMPTS_MAX", 1)
    api.on("GET", "/whoami", drip)
    began = time.monotonic()
    with pytest.raises(errors.Unreachable, match=r"within 0\.5 s"):
        ask(api.url, whoami, timeout_s=0.5)
    assert time.monotonic() - began < 5


def test_dripping_headers_are_cut_off_too(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "ATTEMPTS_MAX", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\n")
                for number in range(200):
                    try:
                        connection.sendall(b"X-%d: y\r\n" % number)
                    except OSError:
                        return
                    time.sleep(0.05)

        pool.submit(serve)
        with pytest.raises(errors.Unreachable, match=r"within 0\.5 s"):
            ask(f"http://127.0.0.1:{listener.getsockname()[1]}", whoami, timeout_s=0.5)


def test_refused_names_the_host(ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(errors.Unreachable, match=address):
        ask(f"http://{address}", whoami)


def test_an_unknown_host_is_named(ask: Ask) -> None:
    with pytest.raises(errors.Unreachable, match=r"no-such-host\.invalid"):
        ask("https://no-such-host.invalid", whoami)


def test_a_kept_connection_that_the_server_closed_is_replaced(api: ScriptedApi) -> None:
    api.on("GET", "/whoami", json_answer(WHOAMI, Connection="close"), json_answer(WHOAMI))
    with Client(api.url, KEY) as client:
        for _ in range(3):
            client.whoami()
    assert api.count("GET", "/whoami") == 3


def test_threads_share_a_client(api: ScriptedApi) -> None:
    api.on("GET", "/whoami", json_answer(WHOAMI))
    with Client(api.url, KEY) as client, ThreadPoolExecutor(8) as pool:
        assert len([*pool.map(lambda _: client.whoami(), range(100))]) == 100


def allocation(state: str, allocation_id: str) -> dict[str, Any]:
    moment = "2026-01-01T00:00:00Z"
    return {
        "id": allocation_id,
        "project_id": "prj_default",
        "name": None,
        "purpose": "interactive",
        "sku": "g1.1",
        "gpus": 1,
        "image": "python:3",
        "state": state,
        "reason": "",
        "labels": {},
        "ports": [],
        "node_id": None,
        "gpu_uuids": [],
        "simulated": True,
        "price_microusd_per_hour": 1,
        "created_at": moment,
        "active_at": None,
        "ended_at": None,
        "deadline_at": None,
        "version": 1,
        "access_urls": {},
    }


def test_waiting_reports_each_change_once(api: ScriptedApi, ask: Ask) -> None:
    wanted = new_id("alc")
    states = ["requested", "requested", "provisioning", "provisioning", "active"]
    api.on("GET", f"/allocations/{wanted}", *(json_answer(allocation(state, wanted)) for state in states))
    seen: list[str] = []
    ended = ask(api.url, lambda client: client.allocations.wait(wanted, on_change=lambda item: seen.append(item.state)))
    assert ended.state == "active"
    assert seen == ["requested", "provisioning", "active"]


def test_waiting_ends_with_its_timeout(api: ScriptedApi, ask: Ask) -> None:
    wanted = new_id("alc")
    api.on("GET", f"/allocations/{wanted}", json_answer(allocation("provisioning", wanted)))
    with pytest.raises(errors.WaitTimeout, match="provisioning"):
        ask(api.url, lambda client: client.allocations.wait(wanted, timeout_s=0.3))

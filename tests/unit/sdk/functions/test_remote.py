"""Calls of functions over HTTP, against a server that answers as the gateway and the api do."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from aiohttp import web

import penstock
import scripted_api
from penstock.sdk import errors, protocol, remote
from penstock.sdk.client import AsyncClient, Client
from penstock.sdk.functions import transport, values
from scripted_api import Handler, ScriptedApi, error_answer, hang_up, json_answer

MOMENT = "2026-01-01T00:00:00Z"
F = penstock.Function.lookup("images-resize")


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedApi]:
    monkeypatch.setattr(protocol, "_BACKOFF_FIRST_S", 0.01)
    before = [*transport._way]
    with (
        scripted_api.serve() as running,
        Client(running.url, "psk_x", project="prj_default", gateway_url=running.url) as client,
        closing(penstock.connect(client)),
    ):
        yield running
    transport._way[:] = before


def invocation(state: str = "succeeded", **fields: Any) -> dict[str, Any]:
    """An invocation as the api shows it."""
    return {
        "id": "inv-1",
        "project_id": "prj_default",
        "function": "images-resize",
        "mode": "sync",
        "state": state,
        "attempts": 1,
        "version": 1,
        "worker": "w",
        "waiting_for": "",
        "status_code": 200,
        "failure_class": "",
        "error": "",
        "error_type": "",
        "traceback": "",
        "progress": None,
        "parent_id": None,
        "timeout_s": None,
        "duration_ms": 1,
        "created_at": MOMENT,
        "due_at": MOMENT,
        "expires_at": None,
        "dispatched_at": None,
        "started_at": None,
        "finished_at": None,
        "content_type": "application/json",
        **fields,
    }


def ack(invocation_id: str = "inv-1") -> dict[str, Any]:
    """An acknowledgement in the source's envelope."""
    text = dict.fromkeys(("mode", "subject", "resultSubject", "metricsSubject", "stream"), "x")
    numbers = {"sequence": 1, "duplicate": False, "acceptedAt": MOMENT}
    return {"data": {"invocationID": invocation_id, "serverlessRequestID": "images-resize", **text, **numbers}}


def line(kind: str, text: str, seq: int) -> dict[str, Any]:
    return {"place": seq, "invocation": "inv-1", "attempt": 1, "seq": seq, "kind": kind, "text": text, "at": MOMENT}


def events(*parts: tuple[str, str, dict[str, Any]]) -> Handler:
    async def handle(_: web.Request) -> web.Response:
        body = "".join(f"id: {place}\nevent: {name}\ndata: {json.dumps(data)}\n\n" for name, place, data in parts)
        return web.Response(text=": connected\n\n" + body, content_type="text/event-stream")

    return handle


def raw(body: bytes, content_type: str) -> Handler:
    async def handle(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=content_type, headers={"Penstock-Invocation-Id": "inv-1"})

    return handle


def test_a_call_goes_through_the_gateway(api: ScriptedApi) -> None:
    api.on("POST", "//f/images-resize", json_answer({"width": 2}, Penstock_Invocation_Id="inv-1"))
    assert F.remote(1, width=2) == {"width": 2}
    [seen] = api.seen
    assert seen.query == {"mode": "sync"}
    assert json.loads(seen.body) == {"args": [1], "kwargs": {"width": 2}, "accept": "pickle"}
    assert seen.headers["authorization"] == "Bearer psk_x"
    assert seen.headers["penstock-project"] == "prj_default"
    assert seen.headers["penstock-invocation-id"].startswith("inv-")


def test_the_async_twins_do_the_same(api: ScriptedApi) -> None:
    api.on("POST", "//f/images-resize", json_answer(7))
    api.on("POST", "/serverless/invocations", json_answer(ack(), 202))
    api.on("GET", "/invocations/inv-1", json_answer(invocation(body=8)))

    async def both() -> list[Any]:
        spawned = await F.spawn.aio(1)
        return [await F.remote.aio(1), await spawned.get.aio()]

    assert asyncio.run(both()) == [7, 8]


def test_what_json_cannot_hold_is_pickled_both_ways(api: ScriptedApi) -> None:
    _, body, _ = values.encode_result((1, 2), sdk=True)
    import base64

    api.on("POST", "//f/images-resize", raw(base64.b64decode(json.loads(body)), values.PICKLE))
    assert F.remote({1, 2}) == (1, 2)
    assert api.seen[0].headers["content-type"] == values.PICKLE
    assert values.decode_call(values.PICKLE, json.loads(api.seen[0].body)).args == ({1, 2},)


def test_a_call_that_outlives_the_gateways_wait_is_waited_for(api: ScriptedApi) -> None:
    api.on("POST", "//f/images-resize", json_answer(ack()["data"], 202, Penstock_Invocation_Id="inv-1"))
    api.on("GET", "/invocations/inv-1", json_answer(invocation("running")), json_answer(invocation(body=[3])))
    assert F.remote() == [3]
    assert api.seen[-1].query == {"wait_s": "20"}


def test_a_failure_raises_the_handlers_own_exception(api: ScriptedApi) -> None:
    failed = invocation(
        "failed",
        error="gone",
        error_type="LookupError",
        traceback="Traceback over there",
        body={"exception": values.encode_exception(LookupError("gone"))},
    )
    api.on("POST", "//f/images-resize", error_answer(500, "handler_error", "gone", Penstock_Invocation_Id="inv-1"))
    api.on("GET", "/invocations/inv-1", json_answer(failed))
    with pytest.raises(LookupError) as caught:
        F.remote()
    assert "over there" in str(caught.value.__cause__)
    api.on("GET", "/invocations/inv-1", json_answer(failed | {"body": None}))
    with pytest.raises(penstock.FunctionFailed, match="LookupError: gone"):
        F.remote()


def test_a_refusal_is_the_apis_error(api: ScriptedApi) -> None:
    api.on("POST", "//f/images-resize", error_answer(404, "no_function", "no function with this name"))
    with pytest.raises(errors.NotFound, match="no function"):
        F.remote()
    api.on("POST", "//f/images-resize", error_answer(429, "queue_full", "full"))
    with pytest.raises(errors.Exhausted):
        F.remote()


def test_a_call_that_broke_off_is_looked_up(api: ScriptedApi) -> None:
    api.on("POST", "//f/images-resize", hang_up)
    with pytest.raises(errors.Unreachable):
        F.remote()
    sent, asked, again = api.seen
    assert asked.path == f"/api/v1/invocations/{sent.headers['penstock-invocation-id']}"
    assert again.headers["penstock-invocation-id"] == sent.headers["penstock-invocation-id"], "there is still one"


def test_a_call_that_never_arrived_is_sent_again_under_its_id(api: ScriptedApi) -> None:
    api.on("POST", "//f/images-resize", hang_up, json_answer(7))
    assert F.remote() == 7
    assert len({seen.headers["penstock-invocation-id"] for seen in api.seen if seen.method == "POST"}) == 1


def test_a_map_that_nobody_follows_keeps_no_threads(api: ScriptedApi) -> None:
    api.on("POST", "/functions/images-resize/map", json_answer({"id": "m", "invocations": ["inv-0", "inv-1"]}, 201))
    api.on("GET", "/invocations/inv-0", json_answer(invocation(body=0)))
    api.on("GET", "/invocations/inv-1", json_answer(invocation("running")))
    results = F.map(range(2))
    assert next(results) == 0
    results.close()
    until = time.monotonic() + 20
    while any(thread.name.startswith("penstock-map") for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_large_result_is_fetched(api: ScriptedApi) -> None:
    kept = {"bytes": 9, "sha256": "0" * 64, "url": "http://x"}
    api.on("GET", "/invocations/inv-1", json_answer(invocation(result=kept, content_type="application/octet-stream")))
    api.on("GET", "/invocations/inv-1/result", raw(b"\x00" * 9, "application/octet-stream"))
    assert penstock.FunctionCall.from_id("inv-1").get() == b"\x00" * 9


def test_a_spawned_call_can_be_asked_and_cancelled(api: ScriptedApi) -> None:
    api.on("POST", "/serverless/invocations", json_answer(ack(), 202))
    api.on("GET", "/invocations/inv-1", json_answer(invocation("running", waiting_for="a worker")))
    api.on("POST", "/invocations/inv-1/cancel", json_answer(invocation("cancelled")))
    call = F.spawn(1)
    assert (call.id, call.status()) == ("inv-1", "running")
    with pytest.raises(penstock.ResultTimeout, match="still running: a worker"):
        call.get(0)
    call.cancel()
    sent = json.loads(api.seen[0].body)
    assert (sent["mode"], sent["payload"]["args"]) == ("async", [1])


def test_a_stream_gives_chunks_and_resumes_where_it_broke(api: ScriptedApi) -> None:
    api.on("POST", "/serverless/invocations", json_answer(ack(), 202))
    odd = json.loads(values.encode_chunk((1,), sdk=True))
    api.on(
        "GET",
        "/invocations/inv-1/events",
        events(("output", "1.0", line("stdout", "hello", 0)), ("output", "1.1", line("chunk", '"a"', 1))),
        events(("output", "1.2", line("chunk", json.dumps(odd), 2)), ("end", "end", invocation(body=None))),
    )
    assert list(F.stream(3)) == ["a", (1,)]
    assert json.loads(api.seen[0].body)["mode"] == "stream"
    assert api.seen[-1].headers["last-event-id"] == "1.1"


def test_a_stream_that_fails_raises_after_its_chunks(api: ScriptedApi) -> None:
    api.on("POST", "/serverless/invocations", json_answer(ack(), 202))
    last = ("end", "end", invocation("failed", error="no"))
    api.on("GET", "/invocations/inv-1/events", events(("output", "1.1", line("chunk", "1", 1)), last))
    stream = F.stream(3)
    assert next(stream) == 1
    with pytest.raises(penstock.FunctionFailed):
        next(stream)


@pytest.mark.parametrize("ordered", [True, False])
def test_map_goes_in_batches_and_keeps_order(api: ScriptedApi, monkeypatch: pytest.MonkeyPatch, ordered: bool) -> None:
    monkeypatch.setattr(remote, "_BATCH_ITEMS", 2)
    monkeypatch.setattr(remote, "_WINDOW", 3)
    made = [[f"inv-{2 * batch}", f"inv-{2 * batch + 1}"] for batch in range(3)]
    answers = [json_answer({"id": "m", "invocations": ids}, 201) for ids in [*made[:2], ["inv-4"]]]
    api.on("POST", "/functions/images-resize/map", *answers)
    for number in range(5):
        state = {"state": "failed", "error": "three"} if number == 3 else {"body": number * 10}
        api.on("GET", f"/invocations/inv-{number}", json_answer(invocation(**{"id": f"inv-{number}"} | state)))
    found = list(F.map(range(5), return_exceptions=True, ordered=ordered))
    results = [item for item in found if isinstance(item, int)]
    assert (results if ordered else sorted(results)) == [0, 10, 20, 40]
    assert [type(item) for item in found if not isinstance(item, int)] == [penstock.FunctionFailed]
    sent = [json.loads(seen.body) for seen in api.seen if seen.method == "POST"]
    assert [[item["args"] for item in body["payloads"]] for body in sent] == [[[0], [1]], [[2], [3]], [[4]]]


def test_a_map_waits_for_room_that_its_own_work_makes(api: ScriptedApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_BATCH_ITEMS", 1)
    full = error_answer(429, "serverless.queue_full", "the queue is full")
    first, second = (json_answer({"id": "m", "invocations": [f"inv-{n}"]}, 201) for n in range(2))
    api.on("POST", "/functions/images-resize/map", first, full, second, full)
    for number in range(2):
        api.on("GET", f"/invocations/inv-{number}", json_answer(invocation(id=f"inv-{number}", body=number)))
    assert list(F.map(range(2))) == [0, 1]
    with pytest.raises(errors.Exhausted, match="queue is full"):
        next(F.map(range(2)))


def test_both_clients_follow(api: ScriptedApi) -> None:
    api.on(
        "GET",
        "/invocations/inv-1/events",
        events(("output", "1.0", line("stdout", "x", 0)), ("end", "end", invocation())),
    )

    async def follow() -> list[Any]:
        async with AsyncClient(api.url, "psk_x") as client:
            return [said async for said in client.invocations.follow("inv-1")]

    found = asyncio.run(follow())
    assert [type(said).__name__ for said in found] == ["OutputLine", "Invocation"]


@pytest.mark.parametrize("name", ["", "a/b", "x" * 64, "ä"])
def test_names_and_ids_that_cannot_be_are_refused_here(api: ScriptedApi, name: str) -> None:
    with Client(api.url, "psk_x") as client:
        with pytest.raises(errors.InvalidArgument):
            client.functions.get(name)
        with pytest.raises(errors.InvalidArgument):
            client.invocations.get(f"{name}/")
    assert not api.seen


def test_without_a_key_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for variable in ("PENSTOCK_API_KEY", "PENSTOCK_API_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_DATA", str(tmp_path))
    monkeypatch.setattr(transport, "_way", [])
    with pytest.raises(penstock.FunctionError, match="penstock up"):
        F.remote()

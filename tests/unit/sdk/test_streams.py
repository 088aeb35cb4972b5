"""Live events and commands, by both clients, against a real server."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from aiohttp import WSMsgType, web

import scripted_api
from penstock.kit.ids import new_id
from penstock.sdk import errors, execute, protocol
from penstock.sdk.client import AsyncClient, Client
from penstock.sdk.commands import CommandResult
from scripted_api import Handler, ScriptedApi, error_answer, hang_up, json_answer, text_answer

KEY = "psk_test"


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with scripted_api.serve() as running:
        yield running


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_BACKOFF_FIRST_S", 0.01)


def event(number: int) -> dict[str, Any]:
    return {
        "cursor": f"c{number}",
        "event_id": f"evt_{number}",
        "event_type": "provisioning.active",
        "aggregate_id": "alc_x",
        "version": number,
        "project_id": None,
        "correlation_id": "cor",
        "occurred_at": "2026-01-01T00:00:00Z",
        "payload": {},
    }


def events(*numbers: int, cut: bool = False) -> Handler:
    """A connection that brings these events and then ends, or breaks within the next one."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": connected\n\n")
        for number in numbers:
            await response.write(f"id: c{number}\ndata: {json.dumps(event(number))}\n\n".encode())
        if cut:
            await response.write(b"id: c9\ndata: {")
            await asyncio.sleep(0.05)
            assert request.transport is not None
            request.transport.abort()
        return response

    return handle


def follow(kind: str, url: str, count: int, **options: Any) -> list[int]:
    if kind == "blocking":
        with Client(url, KEY) as client:
            return [item.version for item in itertools.islice(client.events.follow(**options), count)]

    async def read() -> list[int]:
        found: list[int] = []
        async with AsyncClient(url, KEY) as client:
            stream = client.events.follow(**options)
            async for item in stream:
                found.append(item.version)
                if len(found) == count:
                    break
            await stream.aclose()  # type: ignore[attr-defined]
        return found

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(read())).result()


@pytest.mark.parametrize("kind", ["blocking", "asynchronous"])
class TestEvents:
    def test_every_event_comes_once_over_broken_connections(self, api: ScriptedApi, kind: str) -> None:
        api.on("GET", "/events", json_answer({"items": [event(0)], "next_cursor": None}))
        api.on(
            "GET",
            "/events/stream",
            events(),
            events(1, 2, cut=True),
            hang_up,
            error_answer(503, "unavailable", "later"),
            events(3),
            events(4, 5),
        )
        assert follow(kind, api.url, 5) == [1, 2, 3, 4, 5]
        resumed = [seen.headers.get("last-event-id") for seen in api.seen if seen.path.endswith("/stream")]
        assert resumed == ["c0", "c0", "c2", "c2", "c2", "c3"]

    def test_filters_are_asked_for(self, api: ScriptedApi, kind: str) -> None:
        api.on("GET", "/events/stream", events(1))
        follow(kind, api.url, 1, after="c0", event_type="a.b", aggregate_id="alc_x")
        assert api.seen[0].query == {"event_type": "a.b", "aggregate_id": "alc_x"}

    def test_a_refused_key_ends_it(self, api: ScriptedApi, kind: str) -> None:
        api.on("GET", "/events/stream", error_answer(401, "unauthenticated", "revoked"))
        with pytest.raises(errors.Unauthenticated):
            follow(kind, api.url, 1, after="c0")
        assert len(api.seen) == 1


def run(kind: str, api: ScriptedApi, allocation: str, argv: list[str], **options: Any) -> CommandResult:
    if kind == "blocking":
        with Client(api.url, KEY, gateway_url=api.url) as client:
            return client.allocations.exec(allocation, argv, **options)

    async def once() -> CommandResult:
        async with AsyncClient(api.url, KEY, gateway_url=api.url) as client:
            return await client.allocations.exec(allocation, argv, **options)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(once())).result()


async def echo(request: web.Request) -> web.StreamResponse:
    """Says what it was asked on stderr, gives standard input back, and exits with 7."""
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    first = await socket.receive_json()
    await socket.send_bytes(b"\x02" + json.dumps(first).encode())
    async for message in socket:
        if message.type is WSMsgType.BINARY:
            assert message.data[0] == 0
            await socket.send_bytes(b"\x01" + message.data[1:])
        else:
            assert json.loads(message.data) == {"type": "eof"}
            break
    await socket.send_str('{"type":"exit","code":7,"class":"exited"}')
    await socket.close()
    return socket


def say(*frames: str | bytes) -> Handler:
    """Sends these frames and closes."""

    async def handle(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        for frame in frames:
            await (socket.send_str(frame) if isinstance(frame, str) else socket.send_bytes(frame))
        await socket.close()
        return socket

    return handle


@pytest.mark.parametrize("kind", ["blocking", "asynchronous"])
class TestCommands:
    def test_input_goes_in_and_output_and_code_come_out(self, api: ScriptedApi, kind: str) -> None:
        allocation = new_id("alc")
        api.on("GET", f"//ws/exec/{allocation}", echo)
        data = bytes(range(256)) * 1000
        done = run(kind, api, allocation, ["cat", "-n"], env={"A": "1"}, cwd="/tmp", stdin=data)
        assert (done.exit_code, done.exit_class, done.stdout) == (7, "exited", data)
        assert json.loads(done.stderr) == {"argv": ["cat", "-n"], "env": {"A": "1"}, "cwd": "/tmp"}
        assert api.seen[0].headers["authorization"] == f"Bearer {KEY}"

    def test_a_command_that_does_not_read_its_input_ends(self, api: ScriptedApi, kind: str) -> None:
        allocation = new_id("alc")
        api.on("GET", f"//ws/exec/{allocation}", say('{"type":"exit","code":0,"class":"exited"}'))
        assert run(kind, api, allocation, ["true"], stdin=b"x" * (4 << 20)).exit_code == 0

    @pytest.mark.parametrize(
        ("code", "error"),
        [
            ("unauthenticated", errors.Unauthenticated),
            ("not_found", errors.NotFound),
            ("access.not_active", errors.Conflict),
            ("access.not_runnable", errors.InvalidRequest),
            ("access.node_unreachable", errors.ServerError),
        ],
    )
    def test_a_refusal_is_typed(self, api: ScriptedApi, kind: str, code: str, error: type[Exception]) -> None:
        allocation = new_id("alc")
        last = json.dumps({"type": "error", "code": code, "message": "no", "correlation_id": "cor_x"})
        api.on("GET", f"//ws/exec/{allocation}", say(last))
        with pytest.raises(error) as caught:
            run(kind, api, allocation, ["true"])
        assert caught.value.correlation_id == "cor_x"  # type: ignore[attr-defined]

    def test_no_upgrade_is_an_error_by_its_status(self, api: ScriptedApi, kind: str) -> None:
        with pytest.raises(errors.NotFound):
            run(kind, api, new_id("alc"), ["true"])

    def test_a_connection_that_ends_early_is_not_a_success(self, api: ScriptedApi, kind: str) -> None:
        allocation = new_id("alc")
        api.on("GET", f"//ws/exec/{allocation}", say(b"\x01half"))
        with pytest.raises(errors.Unreachable, match="before the command ended"):
            run(kind, api, allocation, ["true"])

    @pytest.mark.parametrize("frame", ["[", '{"type":"exit"}', '{"type":"later"}', b"", b"\x09x"])
    def test_a_strange_frame_is_refused(self, api: ScriptedApi, kind: str, frame: str | bytes) -> None:
        allocation = new_id("alc")
        api.on("GET", f"//ws/exec/{allocation}", say(frame))
        with pytest.raises(errors.BadAnswer):
            run(kind, api, allocation, ["true"])

    def test_a_redirect_is_not_followed(self, api: ScriptedApi, kind: str) -> None:
        allocation = new_id("alc")
        with scripted_api.serve() as other:
            api.on("GET", f"//ws/exec/{allocation}", text_answer("", 302, Location=f"{other.url}/ws/exec/x"))
            with pytest.raises(errors.BadAnswer, match="redirects to"):
                run(kind, api, allocation, ["true"])
            assert other.seen == []

    def test_a_shell_line_is_not_an_argument_list(self, api: ScriptedApi, kind: str) -> None:
        with pytest.raises(errors.InvalidArgument):
            run(kind, api, new_id("alc"), "rm -rf /")  # type: ignore[arg-type]
        assert api.seen == []


def whoami(gateway_url: str) -> Handler:
    """An api that names this gateway."""
    names = ("principal_id", "principal_kind", "display_name", "organisation_id", "project_id", "role")
    return json_answer(dict.fromkeys(names, "x") | {"operator": False, "key_id": None, "gateway_url": gateway_url})


def test_the_gateway_is_asked_for_once(api: ScriptedApi) -> None:
    allocation = new_id("alc")
    api.on("GET", "/whoami", whoami(api.url))
    api.on("GET", f"//ws/exec/{allocation}", echo)
    with Client(api.url, KEY) as client:
        assert [client.allocations.exec(allocation, ["true"]).exit_code for _ in range(2)] == [7, 7]
    assert api.count("GET", "/whoami") == 1

    async def twice() -> list[int]:
        async with AsyncClient(api.url, KEY) as client:
            return [(await client.allocations.exec(allocation, ["true"])).exit_code for _ in range(2)]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: asyncio.run(twice())).result() == [7, 7]
    assert api.count("GET", "/whoami") == 2


def test_a_gateway_without_an_address_is_a_bad_answer(api: ScriptedApi) -> None:
    api.on("GET", "/whoami", whoami(""))
    with Client(api.url, KEY) as client, pytest.raises(errors.BadAnswer, match="no usable gateway"):
        client.allocations.exec(new_id("alc"), ["true"])


def test_the_blocking_client_runs_commands_inside_a_running_loop(api: ScriptedApi) -> None:
    allocation = new_id("alc")
    api.on("GET", f"//ws/exec/{allocation}", echo)

    async def within() -> int:
        with Client(api.url, KEY, gateway_url=api.url) as client:
            return client.allocations.exec(allocation, ["true"]).exit_code

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: asyncio.run(within())).result() == 7


@pytest.mark.parametrize("kind", ["blocking", "asynchronous"])
def test_a_command_waits_for_a_gateway_that_starts_again(api: ScriptedApi, kind: str) -> None:
    allocation = new_id("alc")
    api.on("GET", f"//ws/exec/{allocation}", hang_up, hang_up, echo)
    assert run(kind, api, allocation, ["true"]).exit_code == 7


def test_a_gateway_that_stays_away_is_given_up(api: ScriptedApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "GATEWAY_RETURN_S", 0.2)
    allocation = new_id("alc")
    api.on("GET", f"//ws/exec/{allocation}", *[hang_up] * 1000)
    with pytest.raises(errors.Unreachable):
        run("blocking", api, allocation, ["true"])

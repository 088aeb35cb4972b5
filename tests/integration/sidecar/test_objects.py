"""The sidecar's part in handlers' objects by itself: questions of a framework, a gateway that is scripted."""

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from penstock.kit.clock import utc_now
from penstock.node.errors import NodeError
from penstock.node.sidecar import objects
from penstock.node.sidecar.gateway import Attempts
from penstock.node.sidecar.objects import Objects
from penstock.wire.serverless import ANSWER_PATH, Mode, State, WorkerDispatchMessage
from penstock.wire.unitobjects import SHA256_HEADER, SIZE_HEADER, TYPE_HEADER, ObjectAnswer, ObjectAsk

Script = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def attempt_of(invocation_id: str) -> WorkerDispatchMessage:
    return WorkerDispatchMessage(
        version="v1",
        invocationID=invocation_id,
        serverlessRequestID="f",
        mode=Mode.ASYNC,
        state=State.RUNNING,
        contentType="application/json",
        resultSubject="",
        metricsSubject="",
        workerName="w",
        workerNamespace="prj",
        dispatchedAt=utc_now(),
        timeoutSeconds=30,
        projectID="prj",
        attempt=1,
        token="70ce",
    )


class Listener:
    """A framework's side (`Framework.ask`): the answers it was told, unless it is deaf for some."""

    def __init__(self) -> None:
        self.answers: dict[str, ObjectAnswer] = {}
        self.deaf = 0
        self._news = asyncio.Event()

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, str]:
        assert (method, path) == ("POST", ANSWER_PATH)
        if self.deaf:
            self.deaf -= 1
            raise NodeError("lost", "nobody listens")
        answer = msgspec.json.decode(body, type=ObjectAnswer)
        assert answer.call not in self.answers, "answered twice"
        self.answers[answer.call] = answer
        self._news.set()
        return 200, ""

    async def answer(self, call: str) -> ObjectAnswer:
        async with asyncio.timeout(20):
            while call not in self.answers:
                self._news.clear()
                await self._news.wait()
        return self.answers[call]


@dataclass
class Shop:
    """The gateway's side: objects in memory. `scripts` answer the next requests instead."""

    kept: dict[str, bytes] = field(default_factory=dict)
    scripts: list[Script] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)
    broken: int = 0

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.seen.append((request.method, request.raw_path))
        assert request.headers["Authorization"] == "Bearer 70ce"
        if self.scripts:
            return await self.scripts.pop(0)(request)
        key = unquote(request.raw_path.partition("?")[0].partition("/objects/")[2])
        match request.method:
            case "PUT":
                return await self._put(request, key)
            case "DELETE":
                del self.kept[key]
                return web.Response(status=204)
            case _ if not key:
                entries = [_entry(each, content) for each, content in sorted(self.kept.items())]
                return web.json_response({"objects": entries, "after": ""})
            case _ if key not in self.kept:
                return refusal("not_found", 404)
            case _:
                return self._get(request, self.kept[key])

    async def _put(self, request: web.BaseRequest, key: str) -> web.Response:
        try:
            content = await request.read()
        except (ConnectionError, aiohttp.ClientError, asyncio.CancelledError):
            self.broken += 1
            raise
        self.kept[key] = content
        return web.json_response(_entry(key, content))

    def _get(self, request: web.BaseRequest, content: bytes) -> web.Response:
        first, length = int(request.query["offset"]), int(request.query["length"])
        about = {SIZE_HEADER: str(len(content)), SHA256_HEADER: _digest(content), TYPE_HEADER: "text/plain"}
        return web.Response(body=content[first : first + length], headers=about)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _entry(key: str, content: bytes) -> dict[str, Any]:
    return {"key": key, "size": len(content), "sha256": _digest(content), "contentType": "text/plain"}


def refusal(code: str, status: int) -> web.Response:
    return web.json_response({"error": {"code": code, "message": f"because of {code}"}}, status=status)


def saying(response: Callable[[], web.StreamResponse]) -> Script:
    async def script(_: web.BaseRequest) -> web.StreamResponse:
        return response()

    return script


class Desk:
    """The module between both, and an attempt that asks."""

    def __init__(self, asked: Objects, listener: Listener, shop: Shop) -> None:
        self.objects = asked
        self.listener = listener
        self.shop = shop
        self.attempt = attempt_of("inv-1")
        self._calls = 0

    def send(self, op: str, *, attempt: WorkerDispatchMessage | None = None, **more: Any) -> str:
        """Ask, and do not wait; the call's name."""
        self._calls += 1
        call = f"call-{self._calls}"
        self.objects.ask(attempt or self.attempt, ObjectAsk(call=call, op=op, **more))  # pyright: ignore[reportArgumentType]
        return call

    async def ask(self, op: str, **more: Any) -> ObjectAnswer:
        return await self.listener.answer(self.send(op, **more))

    async def write(self, part: bytes, *, last: bool = False, **more: Any) -> ObjectAnswer:
        given = {"upload": "up", "key": "made.bin", **more}
        return await self.ask("write", data=base64.b64encode(part).decode(), last=last, **given)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)


@pytest.fixture
async def desk(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Desk]:
    monkeypatch.setattr(objects, "_ASK_S", 1.0)
    monkeypatch.setattr(objects, "_TELL_AGAIN_S", 0.01)
    shop, listener = Shop(), Listener()
    async with RawTestServer(shop.handle, handler_cancellation=True) as server, aiohttp.ClientSession() as session:
        made = Objects(listener, Attempts(session, str(server.make_url("/"))))  # pyright: ignore[reportArgumentType]
        yield Desk(made, listener, shop)
        made.close()


async def test_questions_are_asked_of_the_gateway_for_the_attempt(desk: Desk) -> None:
    desk.shop.kept["a/ä b.txt"] = b"0123456789"
    read = await desk.ask("read", key="a/ä b.txt", offset=2, length=3)
    assert read.entry is not None
    assert (base64.b64decode(read.data), read.entry.size, read.entry.contentType) == (b"234", 10, "text/plain")
    assert read.entry.sha256 == _digest(b"0123456789")
    listed = await desk.ask("list", prefix="a/")
    assert listed.page is not None
    assert [each.key for each in listed.page.objects] == ["a/ä b.txt"]
    assert (await desk.ask("delete", key="a/ä b.txt")).code == ""
    assert desk.shop.kept == {}
    assert {path.partition("/objects")[0] for _, path in desk.shop.seen} == {"/attempts/prj/inv-1"}


async def test_parts_become_one_request(desk: Desk) -> None:
    parts = [bytes([n]) * 100_000 for n in range(5)]
    for part in parts[:-1]:
        assert (await desk.write(part)).entry is None
    done = await desk.write(parts[-1], last=True)
    assert done.entry is not None
    assert (done.entry.size, desk.shop.kept) == (500_000, {"made.bin": b"".join(parts)})
    assert desk.shop.seen == [("PUT", "/attempts/prj/inv-1/objects/made.bin")]
    empty = await desk.write(b"", last=True, key="empty", onlyNew=True)
    assert (empty.entry and empty.entry.size, desk.shop.seen[-1][1].partition("?")[2]) == (0, "only_new=1")


@pytest.mark.parametrize(("code", "status"), [("not_found", 404), ("storage.quota_exceeded", 429), ("denied", 403)])
async def test_a_refusal_reaches_the_handler_in_the_gateways_words(desk: Desk, code: str, status: int) -> None:
    for op in ("read", "list", "delete"):
        desk.shop.scripts.append(saying(lambda: refusal(code, status)))
        answer = await desk.ask(op, key="x", length=1)
        assert (answer.code, answer.error) == (code, f"because of {code}")
    desk.shop.scripts.append(saying(lambda: refusal(code, status)))
    answers = [await desk.write(b"x" * 100_000, last=n == 9) for n in range(10)]
    told = next(each for each in answers if each.code)
    assert (told.code, told.error) == (code, f"because of {code}")


async def test_a_gateway_that_is_away_is_asked_again_but_an_upload_is_not_repeated(desk: Desk) -> None:
    desk.shop.kept["x"] = b"1"
    desk.shop.scripts += [saying(lambda: refusal("away", 503))] * 2
    assert base64.b64decode((await desk.ask("read", key="x", length=1)).data) == b"1"
    desk.shop.seen.clear()
    desk.shop.scripts.append(saying(lambda: refusal("away", 503)))
    assert (await desk.write(b"x", last=True)).code == "away"
    assert (len(desk.shop.seen), desk.shop.kept) == (1, {"x": b"1"})


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(lambda: web.Response(body=b"x", headers={SIZE_HEADER: "many"}), id="no number"),
        pytest.param(lambda: web.Response(body=b"x" * 1000), id="too much"),
        pytest.param(lambda: web.Response(status=400, body=b"\xff"), id="no words"),
        pytest.param(lambda: web.Response(status=302, headers={"Location": "/"}), id="elsewhere"),
    ],
)
async def test_an_answer_that_makes_no_sense_is_a_refusal_and_never_silence(
    desk: Desk, answer: Callable[[], web.Response]
) -> None:
    desk.shop.scripts += [saying(answer)] * 100
    assert (await desk.ask("read", key="x", length=1)).code != ""


async def test_a_list_or_an_entry_that_cannot_be_read_is_a_refusal(desk: Desk) -> None:
    nonsense = saying(lambda: web.Response(body=b'{"objects": [\xff'))
    desk.shop.scripts += [nonsense] * 100
    assert (await desk.ask("list")).code == "away"
    desk.shop.scripts[:] = [nonsense]
    assert (await desk.write(b"x", last=True)).code == "away"


async def test_when_the_attempt_is_over_nobody_waits_and_nothing_is_stored(desk: Desk) -> None:
    async def never(_: web.BaseRequest) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    await desk.write(b"begun")
    await desk.until(lambda: len(desk.shop.seen) == 1)
    desk.shop.scripts.append(never)
    asked = desk.send("read", key="x", length=1)
    await desk.until(lambda: len(desk.shop.seen) == 2)
    desk.objects.forget(desk.attempt)
    await desk.until(lambda: desk.shop.broken == 1)
    assert desk.shop.kept == {}
    assert asked not in desk.listener.answers


async def test_a_handler_can_give_an_upload_up(desk: Desk) -> None:
    await desk.write(b"begun")
    await desk.until(lambda: len(desk.shop.seen) == 1)
    assert (await desk.ask("abort", upload="up")).code == ""
    await desk.until(lambda: desk.shop.broken == 1)
    assert desk.shop.kept == {}


async def test_a_silent_upload_is_given_up(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_IDLE_S", 0.1)
    await desk.write(b"begun")
    await desk.until(lambda: desk.shop.broken == 1)
    assert (await desk.write(b"late", last=True)).code == "away"
    assert desk.shop.kept == {}


async def test_another_attempts_upload_is_out_of_reach(desk: Desk) -> None:
    await desk.write(b"mine")
    stranger = await desk.write(b"theirs", last=True, attempt=attempt_of("inv-2"))
    assert stranger.code == "not_found"
    assert (await desk.write(b"", last=True)).code == ""
    assert desk.shop.kept == {"made.bin": b"mine"}


async def test_questions_and_uploads_are_bounded(desk: Desk) -> None:
    for number in range(8):
        assert (await desk.write(b"x", upload=f"up-{number}")).code == ""
    assert (await desk.write(b"x", upload="up-9")).code == "busy"
    await desk.until(lambda: len(desk.shop.seen) == 8 and not desk.objects._open)  # pyright: ignore[reportPrivateUsage]
    waiting = asyncio.Event()

    async def slow(_: web.BaseRequest) -> web.StreamResponse:
        await waiting.wait()
        return refusal("slow", 400)

    desk.shop.scripts += [slow] * 32
    held = [desk.send("read", key="x", length=1) for _ in range(32)]
    assert (await desk.ask("read", key="x", length=1)).code == "busy"
    waiting.set()
    assert {(await desk.listener.answer(call)).code for call in held} == {"slow"}


async def test_an_answer_that_was_not_heard_is_told_again(desk: Desk) -> None:
    desk.shop.kept["x"] = b"1"
    desk.listener.deaf = 2
    assert (await desk.ask("read", key="x", length=1)).code == ""


async def test_a_part_that_is_no_base64_is_refused(desk: Desk) -> None:
    assert (await desk.ask("write", upload="up", key="x", data="?!")).code == "malformed"
    assert desk.shop.seen == []

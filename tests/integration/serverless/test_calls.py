"""Handlers that call other functions: once however often they ask, and answered however late."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from nats.aio.msg import Msg

from integration.serverless.stage import Stage, result_of, staged, until
from penstock.flows.objects import HandlersObjects
from penstock.kit import audit
from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.kit.errors import PenstockError, Unavailable
from penstock.serverless.edge import FunctionEdge
from penstock.serverless.unitobjects import UnitObjects
from penstock.storage import blobs
from penstock.storage.errors import NoObject
from penstock.storage.model import Limits as StorageLimits
from penstock.storage.service import Objects, Wanted
from penstock.wire import subjects
from penstock.wire.serverless import (
    DISPATCH_BYTES_MAX,
    CallAnswer,
    CallMessage,
    Mode,
    State,
    WorkerDispatchMessage,
)

LARGE = b'{"large": true}'


class Parent:
    """An invocation of the function `f` that has been dispatched and calls others."""

    def __init__(self, stage: Stage, dispatch: WorkerDispatchMessage) -> None:
        self.stage = stage
        self.dispatch = dispatch
        self.answers: asyncio.Queue[CallAnswer] = asyncio.Queue()

    async def listen(self) -> None:
        request = subjects.request_token(self.dispatch.projectID, "f")
        await self.stage.bus.client.subscribe(subjects.call_answer(request, self.dispatch.workerName), cb=self._heard)

    async def _heard(self, message: Msg) -> None:
        self.answers.put_nowait(msgspec.json.decode(message.data, type=CallAnswer))

    async def call(self, call: str, function: str = "g", mode: Mode = Mode.SYNC) -> None:
        given = self.dispatch
        message = CallMessage(
            version="v1",
            projectID=given.projectID,
            invocationID=given.invocationID,
            workerName=given.workerName,
            token=given.token,
            call=call,
            function=function,
            mode=mode,
            payload=msgspec.Raw(b"[1]"),
        )
        subject = subjects.call(subjects.request_token(given.projectID, "f"), given.workerName)
        await self.stage.bus.client.publish(subject, msgspec.json.encode(message))

    async def answer(self) -> CallAnswer:
        async with asyncio.timeout(20):
            return await self.answers.get()


@pytest.fixture
async def stage(database: Database, nats_bus: Bus) -> AsyncIterator[Stage]:
    async with staged(database, nats_bus) as made:
        yield made


@pytest.fixture
async def parent(stage: Stage) -> Parent:
    """Its worker holds it until the test is over; `g` echoes, `h` keeps its result apart."""
    dispatched: asyncio.Future[WorkerDispatchMessage] = asyncio.get_running_loop().create_future()

    async def handle(dispatch: WorkerDispatchMessage) -> Any:
        if dispatch.serverlessRequestID == "f":
            dispatched.set_result(dispatch)
            await asyncio.Event().wait()
        if dispatch.serverlessRequestID == "h":
            kept = await stage.shelf.keep(dispatch.projectID, "large", _once(LARGE), bytes_max=1 << 20)
            await stage.publish(
                subjects.result(subjects.request_token(dispatch.projectID, "h")), result_of(dispatch, bodyRef=kept)
            )
        return msgspec.json.decode(dispatch.payload)

    stage.handler = handle
    for name in ("f", "g", "h"):
        await stage.define(name)
    await stage.spawn("f")
    async with asyncio.timeout(20):
        made = Parent(stage, await dispatched)
    await made.listen()
    return made


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def test_a_call_that_is_asked_for_again_is_made_once_and_answered_from_its_row(
    stage: Stage, parent: Parent
) -> None:
    await parent.call("c1")
    first = await parent.answer()
    assert (first.state, bytes(first.body)) == (State.SUCCEEDED, b"[1]")
    await parent.call("c1")
    assert await parent.answer() == first
    assert (await stage.find(first.invocationID)).attempt == 1


async def test_a_call_that_was_accepted_is_not_refused_for_what_changed_since(stage: Stage, parent: Parent) -> None:
    await parent.call("c1")
    first = await parent.answer()
    async with stage.db.transaction() as tx:
        await tx.execute("update serverless.functions set deleted = true where name = 'g'")
        tx.hint(subjects.FUNCTIONS, b"")
    await until(lambda: _gone(stage))
    await parent.call("c1")
    assert await parent.answer() == first
    await parent.call("c2")
    refused = await parent.answer()
    assert (refused.call, refused.state, refused.invocationID) == ("c2", State.FAILED, "")


async def test_a_call_is_not_refused_for_a_database_that_is_away(
    stage: Stage, parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sidecar hears nothing, and asks again."""
    call, away = stage.invoker.call, asyncio.Event()

    async def failing(*args: Any) -> Any:
        if not away.is_set():
            away.set()
            raise Unavailable("the database cannot answer now")
        return await call(*args)

    monkeypatch.setattr(stage.invoker, "call", failing)
    await parent.call("c1")
    async with asyncio.timeout(20):
        await away.wait()
    await parent.call("c1")
    assert (await parent.answer()).state is State.SUCCEEDED
    assert parent.answers.empty()


async def _gone(stage: Stage) -> bool:
    return await stage.invoker.function("prj_default", "g") is None


async def test_a_spawned_call_is_acknowledged_again_with_the_same_id(stage: Stage, parent: Parent) -> None:
    await parent.call("c1", mode=Mode.ASYNC)
    first = await parent.answer()
    await parent.call("c1", mode=Mode.ASYNC)
    assert (await parent.answer()).invocationID == first.invocationID
    await stage.ended(first.invocationID)


async def test_the_kept_result_of_a_call_is_given_to_its_parent_alone(stage: Stage, parent: Parent) -> None:
    await parent.call("c1", "h")
    answer = await parent.answer()
    assert answer.bodyRef is not None
    given = parent.dispatch
    edge = FunctionEdge(stage.db, None, stage.invoker, stage.shelf, None, None, None)  # pyright: ignore[reportArgumentType]
    own = f"/attempts/{given.projectID}/{given.invocationID}/calls"
    other = await stage.spawn("g", payload=1)
    async with RawTestServer(_answering(edge)) as server, aiohttp.ClientSession(server.make_url("/")) as session:

        async def fetch(path: str, token: str = given.token) -> tuple[int, bytes]:
            async with session.get(path, headers={"Authorization": f"Bearer {token}"}) as found:
                return found.status, await found.read()

        current = f"/attempts/{given.projectID}/{given.invocationID}/current"
        assert await fetch(current) == (204, b"")
        assert await fetch(current, "ab" * 16) == (400, b"unauthenticated")
        assert await fetch(f"{own}/{answer.invocationID}") == (200, LARGE)
        assert await fetch(f"{own}/{answer.invocationID}", "ab" * 16) == (400, b"unauthenticated")
        assert await fetch(f"{own}/{other}") == (400, b"not_found"), "it made no such call"
        assert await fetch(f"{own}/{given.invocationID}") == (400, b"not_found")
        assert await fetch(f"{own}/{answer.invocationID}/more") == (400, b"not_found")


@pytest.mark.parametrize("size", [DISPATCH_BYTES_MAX - 2, DISPATCH_BYTES_MAX - 1])
async def test_a_large_payload_does_not_stand_in_the_stream_of_all_but_is_fetched(stage: Stage, size: int) -> None:
    dispatched: asyncio.Future[WorkerDispatchMessage] = asyncio.get_running_loop().create_future()

    async def handle(dispatch: WorkerDispatchMessage) -> Any:
        dispatched.set_result(dispatch)
        await asyncio.Event().wait()

    stage.handler = handle
    await stage.define()
    await stage.spawn(payload="x" * size)
    async with asyncio.timeout(20):
        given = await dispatched
    payload = msgspec.json.encode("x" * size)
    reference = given.payloadRef
    assert (reference is not None) == (len(payload) > DISPATCH_BYTES_MAX)
    assert bytes(given.payload) == (payload if reference is None else b"null")
    edge = FunctionEdge(stage.db, None, stage.invoker, stage.shelf, None, None, None)  # pyright: ignore[reportArgumentType]
    path = f"/attempts/{given.projectID}/{given.invocationID}/payload"
    async with RawTestServer(_answering(edge)) as server, aiohttp.ClientSession(server.make_url("/")) as session:
        async with session.get(path, headers={"Authorization": f"Bearer {given.token}"}) as found:
            assert (found.status, await found.read()) == (200, payload)
        async with session.get(path, headers={"Authorization": f"Bearer {'ab' * 16}"}) as found:
            assert (found.status, await found.read()) == (400, b"unauthenticated")
    if reference is not None:
        assert (reference.bytes, reference.sha256) == (len(payload), hashlib.sha256(payload).hexdigest())


async def test_an_attempts_token_reaches_the_objects_of_its_project_alone_and_while_it_counts(
    stage: Stage, parent: Parent, tmp_path: Path
) -> None:
    given = parent.dispatch
    objects = Objects(stage.db, blobs.connect(blobs.Access(url=tmp_path.as_uri())), StorageLimits())
    edge = FunctionEdge(
        stage.db,
        None,  # pyright: ignore[reportArgumentType]
        stage.invoker,
        stage.shelf,
        None,  # pyright: ignore[reportArgumentType]
        UnitObjects(HandlersObjects(objects)),
        None,  # pyright: ignore[reportArgumentType]
    )
    own = f"/attempts/{given.projectID}/{given.invocationID}/objects"
    await objects.put("prj_other", "theirs.bin", _one(b"secret"), actor=audit.system("test"), wanted=Wanted())
    async with RawTestServer(_answering(edge)) as server, aiohttp.ClientSession(server.make_url("/")) as session:

        async def ask(method: str, path: str, data: Any = None, token: str = given.token) -> tuple[int, bytes]:
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "text/plain"}
            async with session.request(method, path, data=data, headers=headers) as found:
                return found.status, await found.read()

        assert (await ask("PUT", f"{own}/a.txt", b"0123456789"))[0] == 200
        assert await ask("GET", f"{own}/a.txt?offset=2&length=3") == (200, b"234")
        assert await ask("GET", f"{own}/a.txt?offset=9&length=30") == (200, b"9")
        assert await ask("GET", f"{own}/a.txt?length=1&sha256={'0' * 64}") == (400, b"storage.object_changed")
        assert await ask("PUT", f"{own}/a.txt?only_new=1", b"x") == (400, b"storage.object_exists")
        assert [each["key"] for each in json.loads((await ask("GET", own))[1])["objects"]] == ["a.txt"]
        assert await ask("GET", f"{own}/theirs.bin?length=9") == (400, b"not_found")
        theirs = own.replace(given.projectID, "prj_other")
        assert await ask("GET", f"{theirs}/theirs.bin?length=9") == (400, b"unauthenticated")
        assert await ask("GET", f"{own}/a.txt?length=9", token="ab" * 16) == (400, b"unauthenticated")
        assert await ask("PUT", f"{own}/invocations/x/result-1", b"forged") == (400, b"permission_denied")
        assert await ask("GET", f"{own}/a.txt?length=-1") == (400, b"invalid_request")
        assert await ask("GET", f"{own}/a.txt?length={5 << 20}") == (400, b"invalid_request")
        assert await ask("GET", f"{own}?prefix=%00") == (400, b"invalid_request")
        assert await ask("GET", f"{own}?prefix=%FF") == (400, b"invalid_request")
        await _refuse_unknown_parameters(ask, own)
        assert [each["key"] for each in json.loads((await ask("GET", own))[1])["objects"]] == ["a.txt"]

        async def ending() -> AsyncIterator[bytes]:
            yield b"half"
            async with stage.db.transaction() as tx:
                await tx.execute(
                    "update serverless.invocations set token = $2 where id = $1", given.invocationID, b"another one 16"
                )
            yield b"rest"

        assert await ask("PUT", f"{own}/late.txt", ending()) == (400, b"unauthenticated")
        assert await ask("GET", f"{own}/a.txt?length=9") == (400, b"unauthenticated")
    with pytest.raises(NoObject):
        await objects.find(given.projectID, "late.txt")


async def _refuse_unknown_parameters(ask: Callable[..., Awaitable[tuple[int, bytes]]], objects: str) -> None:
    """On every route of attempts. None of them does what it is for."""
    attempt = objects.removesuffix("/objects")
    routes = [("GET", "current"), ("GET", "payload"), ("GET", "calls/x"), ("PUT", "result"), ("GET", "objects")]
    routes += [(method, "objects/a.txt") for method in ("GET", "PUT", "DELETE")]
    for method, path in routes:
        assert await ask(method, f"{attempt}/{path}?lenght=1") == (400, b"invalid_request"), path
    assert await ask("DELETE", f"{objects}/a.txt?offset=1") == (400, b"invalid_request"), "known elsewhere"


async def _one(chunk: bytes) -> AsyncIterator[bytes]:
    yield chunk


def _answering(edge: FunctionEdge) -> Any:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await edge.attempt(request)
        except PenstockError as error:
            return web.Response(status=400, text=error.code)

    return answer


async def test_why_a_framework_cannot_serve_reaches_the_caller_and_not_the_allocation(stage: Stage) -> None:
    stage.plays = False
    await stage.define()
    call = asyncio.create_task(stage.call(timeoutSeconds=20))
    told: set[str] = set()
    while not call.done():
        for allocation_id, order in list(stage.pool.orders.items()):
            if order.worker not in told and await _exists(stage, order.worker):
                told.add(order.worker)
                await stage.parts.warden.unhealthy(order.worker, "ImportError: no \0\nTraceback: line 3")
                assert stage.pool.released[allocation_id] == "framework_unhealthy: ImportError: no �"
        await asyncio.sleep(0.02)
    end = await call
    assert (end.state, end.failureClass) == (State.FAILED, "framework_unhealthy")
    assert end.error.endswith("framework_unhealthy: ImportError: no �\nTraceback: line 3")


async def _exists(stage: Stage, worker: str) -> bool:
    return bool(await stage.value("select 1 from serverless.workers where id = $1", worker))

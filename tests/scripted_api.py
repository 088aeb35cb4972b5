"""A real HTTP server in a thread that answers as a test scripts it: for clients, which must cope with any server."""

import asyncio
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Seen:
    """A request that arrived."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


def json_answer(value: Any, status: int = 200, **headers: str) -> Handler:
    """Answer with JSON."""
    names = {name.replace("_", "-"): text for name, text in headers.items()}

    async def handle(_: web.Request) -> web.Response:
        return web.Response(
            body=msgspec.json.encode(value), status=status, content_type="application/json", headers=names
        )

    return handle


def text_answer(text: str, status: int = 200, **headers: str) -> Handler:
    """Answer with anything."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}

    async def handle(_: web.Request) -> web.Response:
        return web.Response(text=text, status=status, content_type="text/html", headers=names)

    return handle


def error_answer(status: int, code: str, message: str, field: str | None = None, **headers: str) -> Handler:
    """Answer with the error envelope."""
    detail = {"code": code, "message": message, "correlation_id": "cor_test", "field": field}
    return json_answer({"error": {key: value for key, value in detail.items() if value}}, status, **headers)


async def hang_up(request: web.Request) -> web.StreamResponse:
    """Close the connection without a word."""
    assert request.transport is not None
    request.transport.abort()
    raise web.HTTPInternalServerError


class ScriptedApi:
    """Answers of a path are given in order; the last one stays."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.url = ""
        self._script: dict[tuple[str, str], list[Handler]] = {}

    def on(self, method: str, path: str, *handlers: Handler) -> None:
        """Script a path below /api/v1; a path that starts with // is taken from the root."""
        full = path[1:] if path.startswith("//") else f"/api/v1{path}"
        self._script[method, full] = list(handlers)

    def count(self, method: str, path: str) -> int:
        """How many requests came."""
        return sum(1 for seen in self.seen if (seen.method, seen.path) == (method, f"/api/v1{path}"))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        body = b"" if headers.get("upgrade") else await request.read()
        self.seen.append(Seen(request.method, request.path, dict(request.query), headers, body))
        handlers = self._script.get((request.method, request.path))
        if not handlers:
            return await error_answer(404, "not_found", "no object with this id")(request)
        handler = handlers.pop(0) if len(handlers) > 1 else handlers[0]
        return await handler(request)


@contextmanager
def serve(tls: ssl.SSLContext | None = None) -> Iterator[ScriptedApi]:
    """Run a server in a thread of its own."""
    api, started, loop = ScriptedApi(), threading.Event(), asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", api.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        port = runner.addresses[0][1]
        api.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield api
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)

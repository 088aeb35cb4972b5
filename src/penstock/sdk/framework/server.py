"""The framework's routes and how handlers run: those that block in threads, asynchronous ones on the loop.

A handler that ends the process ends it: the sidecar sees that. One that cannot be cancelled ends it too, as soon as
nothing else runs, since its thread cannot be got back in any other way.
"""

import asyncio
import contextlib
import contextvars
import inspect
import json
import os
import sys
from typing import Any

from penstock.sdk.framework import capture
from penstock.sdk.framework import exchange as answers
from penstock.sdk.framework.calls import Inside
from penstock.sdk.framework.connection import Connection
from penstock.sdk.framework.exchange import CANCELLED, Exchange
from penstock.sdk.framework.handler import Bound, Handler
from penstock.sdk.framework.threads import Threads
from penstock.sdk.functions import values
from penstock.sdk.functions.errors import InvocationCancelled
from penstock.sdk.functions.invocation import current

#: Not cancelled in time. The sidecar takes the process for lost with any status; this one says why.
EXIT_NOT_CANCELLED = 70


class Framework:
    """What answers on the socket. `broken` says why the handler could not be made ready."""

    def __init__(self, handler: Handler, *, broken: bytes, slots: int, invoke: str, health: str) -> None:
        self.calls = Inside()
        self._handler = handler
        self._broken = broken
        self._slots = slots
        self._routes = {
            ("GET", health): self._health,
            ("POST", invoke): self._invoke,
            ("POST", "/cancel"): self._cancel,
            ("POST", "/answer"): self._answer,
        }
        self._process = os.getpid()
        self._threads = Threads()
        self._running: dict[Exchange, None] = {}
        self._stuck: set[Exchange] = set()

    def serve(self, connection: Connection, method: str, path: str, body: bytes) -> None:
        """One request."""
        route = self._routes.get((method, path))
        if route is None:
            connection.answer(404, b'{"error":"no such path"}')
        else:
            route(connection, body)

    def sole(self) -> "Exchange | None":
        """The only invocation that runs."""
        # A copy: any thread may ask.
        running = list(self._running)
        return running[0] if len(running) == 1 else None

    def _health(self, connection: Connection, _: bytes) -> None:
        connection.answer(500 if self._broken else 200, self._broken or b'{"status":"ok"}')

    def _invoke(self, connection: Connection, body: bytes) -> None:
        if self._broken:
            connection.answer(503, self._broken)
            return
        request = _object(body)
        if request is None:
            why = "not a JSON object, or too deep or with too long a number for Python"
            connection.answer(400, json.dumps({"error": f"the request is {why}"}).encode())
            return
        if len(self._running) >= self._slots:
            connection.answer(503, b'{"error":"all slots are taken"}')
            return
        try:
            exchange = Exchange(connection, request, self)
        except (TypeError, ValueError):
            connection.answer(400, b'{"error":"a field of the request has the wrong type"}')
            return
        self._running[exchange] = None
        for stream, text in capture.early.take():
            exchange.write(stream, text)
        connection.lost, connection.resumed = (lambda: self._stop(exchange)), exchange.has_room
        self._start(exchange)

    def _start(self, exchange: Exchange) -> None:
        context = contextvars.copy_context()
        context.run(current.set, exchange)
        try:
            bound = context.run(self._handler.bind, exchange.content_type, exchange.payload)
        except Exception as error:  # noqa: BLE001 - the caller's arguments, opened by the tenant's classes
            sdk = exchange.content_type == values.PICKLE
            exchange.finish(answers.failed(error, sdk=sdk, status=400))
            return
        if bound.target.on_loop:
            exchange.task = context.run(asyncio.ensure_future, self._await(exchange, bound))
        else:
            self._threads.run(lambda: context.run(self._block, exchange, bound))

    def _block(self, exchange: Exchange, bound: Bound) -> None:
        """In a thread."""
        try:
            exchange.interrupt.begin()
            try:
                value = bound()
                if inspect.isgenerator(value):
                    value = _iterate(exchange, value, sdk=bound.sdk)
            finally:
                exchange.interrupt.end()
            reply = answers.succeeded(value, sdk=bound.sdk)
        except InvocationCancelled:
            reply = CANCELLED
        except (SystemExit, KeyboardInterrupt) as error:
            end_process(_status(error))
            return
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is told to its owner
            reply = answers.failed(error, sdk=bound.sdk)
        self._end_if_forked()
        exchange.finish_soon(CANCELLED if exchange.cancelled else reply)

    async def _await(self, exchange: Exchange, bound: Bound) -> None:
        """On the loop."""
        try:
            value = bound()
            value = await (_iterate_async(exchange, value, sdk=bound.sdk) if inspect.isasyncgen(value) else value)
            reply = answers.succeeded(value, sdk=bound.sdk)
        except (SystemExit, KeyboardInterrupt) as error:
            end_process(_status(error))
            return
        except BaseException as error:  # noqa: BLE001 - as above
            reply = answers.failed(error, sdk=bound.sdk)
        self._end_if_forked()
        exchange.finish(CANCELLED if exchange.cancelled else reply)

    def _cancel(self, connection: Connection, body: bytes) -> None:
        asked = _object(body) or {}
        found = [
            exchange
            for exchange in self._running
            if exchange.invocation.id == asked.get("invocationID")
            and asked.get("attempt") in (None, exchange.invocation.attempt)
        ]
        for exchange in found:
            self._stop(exchange)
        connection.answer(200 if found else 404, b'{"cancelled":true}' if found else b'{"cancelled":false}')

    def _stop(self, exchange: Exchange) -> None:
        self.calls.forget(exchange)
        exchange.cancel()

    def _answer(self, connection: Connection, body: bytes) -> None:
        message = _object(body)
        known = message is not None and self.calls.answered(message)
        connection.answer(200 if known else 404, b"{}" if known else b'{"error":"no such call"}')

    def ended(self, exchange: Exchange) -> None:
        """It was answered."""
        self._running.pop(exchange, None)
        self.calls.forget(exchange)
        self._end_if_stuck()

    def overdue(self, exchange: Exchange) -> None:
        """It was cancelled, and its handler goes on: its slot is free, its thread is not."""
        self._stuck.add(exchange)
        exchange.finish(CANCELLED)

    def returned(self, exchange: Exchange) -> None:
        """Its handler ended after all."""
        self._stuck.discard(exchange)

    def _end_if_forked(self) -> None:
        """A child that a handler made and let run on: the answer is its parent's to give."""
        if os.getpid() != self._process:
            end_process(0)

    def _end_if_stuck(self) -> None:
        if self._stuck and not self._running:
            print("a handler did not end within its grace after it was cancelled", file=sys.__stderr__)
            end_process(EXIT_NOT_CANCELLED)


def _iterate(exchange: Exchange, chunks: Any, *, sdk: bool) -> Any:
    """Send each chunk; the result is what the generator returns, or all chunks for a caller who did not follow."""
    followed, kept = exchange.invocation.mode == "stream", list[Any]()
    try:
        while True:
            chunk = next(chunks)
            exchange.say(b'{"chunk":' + values.encode_chunk(chunk, sdk=sdk) + b"}")
            if not followed:
                kept.append(chunk)
    except StopIteration as stop:
        return stop.value if followed else kept
    finally:
        chunks.close()


async def _iterate_async(exchange: Exchange, chunks: Any, *, sdk: bool) -> Any:
    followed, kept = exchange.invocation.mode == "stream", list[Any]()
    try:
        async for chunk in chunks:
            exchange.say(b'{"chunk":' + values.encode_chunk(chunk, sdk=sdk) + b"}")
            await exchange.drained()
            if not followed:
                kept.append(chunk)
    finally:
        await chunks.aclose()
    return None if followed else kept


def _object(body: bytes) -> "dict[str, Any] | None":
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _status(error: BaseException) -> int:
    """As the interpreter would end."""
    code = error.code if isinstance(error, SystemExit) else 130
    return code & 0xFF if isinstance(code, int) else 0 if code is None else 1


def end_process(status: int) -> None:
    """At once: a handler that hangs would keep the interpreter from ending by itself."""
    for stream in (sys.__stdout__, sys.__stderr__):
        # Whatever a handler did to it must not keep the process alive.
        with contextlib.suppress(Exception):
            if stream is not None:
                stream.flush()
    os._exit(status)

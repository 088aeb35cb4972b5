"""Runs a command in a unit over a WebSocket. Leaving early closes the socket, which kills the command."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from penstock.sdk.commands import EOF_FRAME, Command, ending, with_gateway
from penstock.sdk.errors import BadAnswer, Unreachable, for_status
from penstock.sdk.failures import broken_off, not_connected
from penstock.sdk.protocol import backoff_s, excerpt
from penstock.wire.tunnel import STDERR, STDIN, STDOUT

if TYPE_CHECKING:
    from penstock.sdk.asynchronous import AsyncExecutor

_HEARTBEAT_S: Final = 20.0
_CLOSE_S: Final = 2.0
#: So long a gateway that takes no connection is dialled again, as during its restart.
GATEWAY_RETURN_S: Final = 10.0
_DIAL_PAUSE_MAX_S: Final = 1.0
_FRAME_BYTES_MAX: Final = 4 << 20
#: The largest piece of standard input in one frame.
CHUNK_BYTES: Final = 64 << 10

Write = Callable[[int, bytes], None]


class _OutputFailed(Exception):
    """Our own output cannot be written: nothing that the connection is to blame for."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


async def once(data: bytes) -> AsyncIterator[bytes]:
    """Standard input that is known beforehand."""
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


async def execute(
    executor: "AsyncExecutor", command: Command, *, stdin: AsyncIterator[bytes], write: Write
) -> tuple[int, str]:
    """The command's exit code and class. `write` gets each piece of output with its channel."""
    executor.target = await executor.run(with_gateway(executor.target))
    host = str(executor.target.gateway_url).partition("://")[2]
    socket = await _connected(executor, host, f"/ws/exec/{command.allocation_id}")
    try:
        async with socket:
            # A gateway that closes at once still has its last words read.
            with suppress(ConnectionClosed):
                await socket.send(command.opening())
            return await _converse(socket, stdin, write)
    except _OutputFailed as error:
        raise error.cause from error
    except ConnectionClosed as error:
        raise broken_off(host, error, executor.timeout_s) from error


class _Connect(connect):
    def process_redirect(self, exc: Exception) -> Exception | str:
        """Redirects are never followed: the key is for this host."""
        return exc


async def _connected(executor: "AsyncExecutor", host: str, path: str) -> ClientConnection:
    """A connection to the gateway. Before the first frame there is no command, so dialling again repeats nothing."""
    deadline, failures = time.monotonic() + GATEWAY_RETURN_S, 0
    while True:
        try:
            return await _dialled(executor, host, path)
        except Unreachable as error:
            failures += 1
            pause_s = min(_DIAL_PAUSE_MAX_S, backoff_s(failures))
            if not error.passing or time.monotonic() + pause_s > deadline:
                raise
        await asyncio.sleep(pause_s)


async def _dialled(executor: "AsyncExecutor", host: str, path: str) -> ClientConnection:
    secure = str(executor.target.gateway_url).startswith("https:")
    try:
        return await _Connect(
            f"{'wss' if secure else 'ws'}://{host}{path}",
            additional_headers=executor.target.headers(),
            user_agent_header=None,
            ssl=executor.tls() if secure else None,
            compression=None,
            proxy=None,
            open_timeout=executor.timeout_s,
            ping_interval=_HEARTBEAT_S,
            ping_timeout=_HEARTBEAT_S,
            close_timeout=_CLOSE_S,
            max_size=_FRAME_BYTES_MAX,
        )
    except InvalidStatus as error:
        raise _refused(error.response.status_code, error.response.headers.get("Location", "")) from error
    except TimeoutError as error:
        raise broken_off(host, error, executor.timeout_s) from error
    except OSError as error:
        raise not_connected(host, error) from error
    except InvalidHandshake as error:
        raise broken_off(host, error, executor.timeout_s) from error


async def _converse(socket: ClientConnection, stdin: AsyncIterator[bytes], write: Write) -> tuple[int, str]:
    sender = asyncio.create_task(_send(socket, stdin))
    try:
        async for message in socket:
            if isinstance(message, str):
                last = ending(message)
                return last.code, last.exit_class
            _deliver(message, write)
        raise Unreachable("the gateway closed the connection before the command ended", sent=True)
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)


async def _send(socket: ClientConnection, stdin: AsyncIterator[bytes]) -> None:
    async for chunk in stdin:
        await socket.send(bytes((STDIN,)) + chunk)
    await socket.send(EOF_FRAME)


def _deliver(frame: bytes, write: Write) -> None:
    if not frame or frame[0] not in {STDOUT, STDERR}:
        raise BadAnswer("the gateway sent data on an unknown channel")
    try:
        write(frame[0], frame[1:])
    except OSError as error:
        raise _OutputFailed(error) from error


def _refused(status: int, location: str) -> Exception:
    if 300 <= status < 400:
        target = excerpt(location or "an unknown place")
        return BadAnswer(f"the server redirects to {target}; redirects are not followed", status=status)
    if status < 400:
        return BadAnswer(f"the gateway does not speak WebSocket here (status {status})", status=status)
    words = {401: "the key is not valid", 403: "your role does not allow this", 404: "no such allocation"}
    message = words.get(status, f"the gateway refused with status {status}")
    return for_status(status)(message, code=f"http_{status}", status=status)

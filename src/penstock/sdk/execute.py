"""Runs a command in a unit over a WebSocket. Leaving early closes the socket, which kills the command."""

import asyncio
import socket as sockets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Final

import aiohttp

from penstock.sdk.commands import EOF_FRAME, Command, ending, with_gateway
from penstock.sdk.errors import BadAnswer, Unreachable, for_status
from penstock.sdk.failures import unreachable
from penstock.wire.tunnel import STDERR, STDIN, STDOUT

if TYPE_CHECKING:
    from penstock.sdk.asynchronous import AsyncExecutor

_HEARTBEAT_S: Final = 20.0
_CLOSE_S: Final = 2.0
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
    gateway = str(executor.target.gateway_url)
    host = gateway.partition("://")[2]
    url = f"{gateway}/ws/exec/{command.allocation_id}"
    try:
        async with _connected(executor, url) as socket:
            # A gateway that closes at once still has its last words read.
            with suppress(aiohttp.ClientConnectionResetError):
                await socket.send_str(command.opening())
            return await _converse(socket, stdin, write)
    except _OutputFailed as error:
        raise error.cause from error
    except aiohttp.WSServerHandshakeError as error:
        raise _refused(error) from error
    except (aiohttp.ClientError, OSError) as error:
        raise unreachable(host, error, executor.timeout_s) from error


@asynccontextmanager
async def _connected(executor: "AsyncExecutor", url: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    async with asyncio.timeout(executor.timeout_s):
        socket = await executor.session().ws_connect(url, heartbeat=_HEARTBEAT_S, max_msg_size=_FRAME_BYTES_MAX)
    with _hung_up(socket):
        try:
            yield socket
        finally:
            # A server that goes on sending would else be listened to until it stops.
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await socket.close()


@contextmanager
def _hung_up(socket: aiohttp.ClientWebSocketResponse) -> Iterator[None]:
    """Input that nobody has read by the end would else keep the connection open for as long as the loop runs. With a
    gateway that closed at once there is none any more."""
    found = socket.get_extra_info("socket")
    connection: sockets.socket | None = found.dup() if found is not None else None
    try:
        yield
    finally:
        if connection is not None:
            with connection, suppress(OSError):
                connection.shutdown(sockets.SHUT_RDWR)


async def _converse(
    socket: aiohttp.ClientWebSocketResponse, stdin: AsyncIterator[bytes], write: Write
) -> tuple[int, str]:
    sender = asyncio.create_task(_send(socket, stdin))
    try:
        async for message in socket:
            if message.type is aiohttp.WSMsgType.TEXT:
                last = ending(message.data)
                return last.code, last.exit_class
            if message.type is aiohttp.WSMsgType.BINARY:
                _deliver(message.data, write)
        raise Unreachable("the gateway closed the connection before the command ended", sent=True)
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)


async def _send(socket: aiohttp.ClientWebSocketResponse, stdin: AsyncIterator[bytes]) -> None:
    async for chunk in stdin:
        await socket.send_bytes(bytes((STDIN,)) + chunk)
    await socket.send_str(EOF_FRAME)


def _deliver(frame: bytes, write: Write) -> None:
    if not frame or frame[0] not in {STDOUT, STDERR}:
        raise BadAnswer("the gateway sent data on an unknown channel")
    try:
        write(frame[0], frame[1:])
    except OSError as error:
        raise _OutputFailed(error) from error


def _refused(error: aiohttp.WSServerHandshakeError) -> Exception:
    if error.status < 400:
        return BadAnswer(f"the gateway does not speak WebSocket here (status {error.status})", status=error.status)
    kind = for_status(error.status)
    words = {401: "the key is not valid", 403: "your role does not allow this", 404: "no such allocation"}
    message = words.get(error.status, f"the gateway refused with status {error.status}")
    return kind(message, code=f"http_{error.status}", status=error.status)

"""`GET /ws/exec/<allocation>`: a command in a unit, over a WebSocket.

The first text frame says what to run. Then binary frames carry a channel byte and data, the text frame
`{"type": "eof"}` ends standard input, and the last text frame from here is `exit` or `error`. The command does not
outlive the socket, and a client that reads slowly slows the command down.
"""

import asyncio
from typing import Annotated, Any, Final

import msgspec
from aiohttp import WSMessage, WSMsgType, web
from msgspec import Meta

from penstock.access.answers import close_code
from penstock.access.errors import NotActive, from_abort
from penstock.access.model import Grant
from penstock.access.service import Access
from penstock.access.sessions import Ending, Sessions
from penstock.access.upstream import Dial
from penstock.kit import jsonbody, parsing
from penstock.kit.errors import Invalid, PenstockError, Unauthenticated, Unavailable
from penstock.kit.stream import Stream, StreamAborted
from penstock.kit.telemetry import correlation_id, logger
from penstock.wire.tunnel import CONTROL, STDIN, ExecExit, UnitExec
from penstock.wire.unreadable import UNREADABLE

MESSAGE_BYTES_MAX: Final = 1 << 20
COMMAND_BYTES_MAX: Final = 256 << 10
_NOTE_CHARS_MAX: Final = 1024
_FIRST_FRAME_S: Final = 10.0
_HEARTBEAT_S: Final = 20.0
#: A client that takes nothing for so long is gone.
_STALLED_S: Final = 600.0

_log = logger(__name__)

Word = Annotated[str, Meta(max_length=128 << 10, pattern=r"^[^\x00]*$")]

Name = Annotated[str, Meta(max_length=255, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first frame."""

    argv: Annotated[list[Word], Meta(min_length=1, max_length=1024)]
    env: Annotated[dict[Name, Word], Meta(max_length=256)] = {}
    cwd: Annotated[str, Meta(max_length=4096, pattern=r"^(/[^\x00]*)?$")] = ""


class _Note(msgspec.Struct, frozen=True):
    type: str


_command_decoder: Final = msgspec.json.Decoder(Command)
_note_decoder: Final = msgspec.json.Decoder(_Note)
_exit_decoder: Final = msgspec.msgpack.Decoder(ExecExit)


class Executions:
    """Runs commands for clients."""

    def __init__(self, access: Access, sessions: Sessions, dial: Dial) -> None:
        self._access = access
        self._sessions = sessions
        self._dial = dial

    async def serve(
        self, request: web.BaseRequest, authorization: str | None, project: str | None, allocation_id: str
    ) -> web.WebSocketResponse:
        """One command. Refusals are told on the open socket, where every client can read them."""
        socket = web.WebSocketResponse(
            max_msg_size=MESSAGE_BYTES_MAX + 1, heartbeat=_HEARTBEAT_S, compress=False, timeout=2.0
        )
        await socket.prepare(request)
        try:
            grant = await self._access.authorise(authorization, project, allocation_id)
            command = await _first_frame(socket)
            await self._access.record_exec(grant, command.argv)
            ended = await self._run(socket, grant, command)
        except PenstockError as error:
            await _refuse(socket, error)
        except (_ClientGone, ConnectionError):
            await socket.close()
        except TimeoutError:
            await socket.close(code=1008, message=b"slow_consumer")
        else:
            await _say(socket, {"type": "exit", "code": ended.code, "class": ended.exit_class})
            await socket.close()
        return socket

    async def _run(self, socket: web.WebSocketResponse, grant: Grant, command: Command) -> ExecExit:
        target = UnitExec(unit_id=grant.unit_id, argv=command.argv, env=command.env, cwd=command.cwd)
        stream = await self._dial(grant.node_id, target)
        work = asyncio.ensure_future(_converse(socket, stream))
        verdict: list[PenstockError] = []

        def end(ending: Ending) -> None:
            verdict.append(_verdict(ending))
            work.cancel()

        session = self._sessions.begin(grant, end)
        finished = False
        try:
            ended = await work
            finished = True
        except asyncio.CancelledError:
            if verdict:
                raise verdict[0] from None
            raise
        except StreamAborted as error:
            raise from_abort(error) from error
        else:
            # Not an abort: what the command left running in the unit stays.
            stream.end()
            return ended
        finally:
            self._sessions.finish(session)
            work.cancel()
            # Also when standard input has ended: who leaves early takes the command along.
            if not finished:
                stream.abort("cancelled")


def _verdict(ending: Ending) -> PenstockError:
    if ending is Ending.REVOKED:
        return Unauthenticated("the API key or the session was revoked")
    return NotActive("the allocation was released")


class _ClientGone(Exception):
    """The client left or broke the WebSocket protocol."""


def read_command(text: str) -> Command:
    """The command in the first frame, or Invalid."""
    try:
        return _command_decoder.decode(text)
    except msgspec.ValidationError as error:
        raise jsonbody.invalid(str(error)) from error
    except (UnicodeEncodeError, *UNREADABLE) as error:
        raise Invalid(f"the first frame is not JSON: {error}", field="$") from error


async def _first_frame(socket: web.WebSocketResponse) -> Command:
    try:
        message = await socket.receive(timeout=_FIRST_FRAME_S)
    except TimeoutError as error:
        raise Invalid(f"no command within {_FIRST_FRAME_S:g} s", field="argv") from error
    if message.type is WSMsgType.BINARY:
        raise Invalid("the first frame must be text: a JSON object with argv", field="argv")
    if message.type is not WSMsgType.TEXT:
        raise _ClientGone
    if len(message.data) > COMMAND_BYTES_MAX:
        raise Invalid(f"argv, env and cwd: max {COMMAND_BYTES_MAX} bytes together", field="argv")
    command = await parsing.parse(len(message.data), read_command, message.data)
    if not command.argv[0]:
        raise Invalid("argv[0] must name a program", field="argv")
    return command


async def _converse(socket: web.WebSocketResponse, stream: Stream) -> ExecExit:
    """Both directions at once, until the command ends or the client leaves."""
    reading = asyncio.ensure_future(_take_input(socket, stream))
    output = asyncio.ensure_future(_send_output(socket, stream))
    try:
        await asyncio.wait([reading, output], return_when=asyncio.FIRST_COMPLETED)
        if not output.done():
            reading.result()
        return await output
    finally:
        reading.cancel()
        output.cancel()
        await asyncio.gather(reading, output, return_exceptions=True)


async def _take_input(socket: web.WebSocketResponse, stream: Stream) -> None:
    """From the client to the command; ends only by an error, so that a client that leaves is noticed."""
    open_input = True
    while True:
        message: WSMessage = await socket.receive()
        if message.type is WSMsgType.BINARY:
            if not message.data or message.data[0] != STDIN:
                raise Invalid("the first byte of a binary frame is the channel, and only 0 leads in", field="channel")
            if open_input:
                stream.write(message.data[1:], STDIN)
                await stream.drain()
        elif message.type is WSMsgType.TEXT:
            _check_note(message.data)
            if open_input:
                stream.end()
            open_input = False
        else:
            raise _ClientGone


def _check_note(text: str) -> None:
    try:
        note = _note_decoder.decode(text[:_NOTE_CHARS_MAX])
    except (UnicodeEncodeError, *UNREADABLE) as error:
        raise Invalid(f"not a JSON object with a type: {error}", field="type") from error
    if note.type != "eof":
        raise Invalid('the only type of text frame after the first is "eof"', field="type")


async def _send_output(socket: web.WebSocketResponse, stream: Stream) -> ExecExit:
    while (item := await stream.read()) is not None:
        channel, payload = item
        if channel == CONTROL:
            return _exit_decoder.decode(payload)
        async with asyncio.timeout(_STALLED_S):
            await socket.send_bytes(bytes((channel,)) + payload)
    raise Unavailable("the node did not say how the command ended")


async def _refuse(socket: web.WebSocketResponse, error: PenstockError) -> None:
    note: dict[str, Any] = {"type": "error", "code": error.code, "message": error.detail}
    if error.field is not None:
        note["field"] = error.field
    await _say(socket, note | {"correlation_id": correlation_id()})
    await socket.close(code=close_code(error), message=error.detail.encode()[:120])


async def _say(socket: web.WebSocketResponse, note: dict[str, Any]) -> None:
    """The last words, which a client that has left does not hear."""
    try:
        await socket.send_str(msgspec.json.encode(note).decode())
    except ConnectionError as error:
        _log.debug("client_gone", error=repr(error))

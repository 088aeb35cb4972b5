"""The node's end of the tunnel: dials the gateway over mTLS and joins streams to ports and commands of units.

The agent only moves bytes. Ports are connected inside the unit's sandbox by its init, which hands the socket out; so a
stream reaches what the unit listens on and nothing of the host. A stream that ends kills its command.
"""

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol

import msgspec
from yarl import URL

from penstock.kit.stream import Stream, StreamAborted
from penstock.kit.streamio import Pump
from penstock.kit.telemetry import logger
from penstock.kit.tunnel import Mux
from penstock.kit.websocket import dial
from penstock.node.errors import NodeError
from penstock.node.foreign import ForeignTransport
from penstock.node.identity import Identity, check_gateway
from penstock.node.pace import Crowd, Pace
from penstock.wire.tunnel import CONTROL, FRAME_BYTES_MAX, STDERR, STDIN, STDOUT, ExecExit, Open, UnitExec, UnitPort

_log = logger(__name__)
_CONNECT_S: Final = 10.0
#: How long a command's output may stay open and silent after the command itself ended.
_LINGER_S: Final = 1.0


class Execution(Protocol):
    """A command that runs in a unit."""

    async def wait(self) -> ExecExit:
        """How it ended."""
        ...

    def kill(self) -> None:
        """End it and what it started."""
        ...


class Units(Protocol):
    """The units of this node, as the tunnel needs them."""

    async def connect_port(self, unit_id: str, port: int) -> socket.socket:
        """A connected, non-blocking socket to a port on the unit's own loopback."""
        ...

    async def execute(
        self,
        unit_id: str,
        *,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        stdin: int,
        stdout: int,
        stderr: int,
    ) -> Execution:
        """Run a command in the unit on these file descriptors."""
        ...


class NodeTunnel:
    """Keeps one tunnel to a gateway open."""

    def __init__(self, identity: Identity, units: Units, crowd: Crowd | None = None) -> None:
        self._identity = identity
        self._units = units
        self._pace = Pace(crowd or Crowd(), second=True)
        self._serving: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Dial, serve, and dial again for ever."""
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            try:
                await self.serve_once()
            except (OSError, TimeoutError, NodeError) as error:
                _log.info("tunnel_down", error=repr(error))
            await asyncio.sleep(self._pace.pause_s(stood_s=loop.time() - started))

    async def serve_once(self) -> None:
        """One tunnel, until it ends."""
        url = URL(self._identity.socket_url("/tunnel"))
        async with asyncio.timeout(_CONNECT_S):
            connection = await dial(
                url.host or "", url.port or 443, url.path, tls=self._identity.tls(), message_bytes_max=FRAME_BYTES_MAX
            )
        mux = Mux(connection, accept=self._accept)
        try:
            check_gateway(connection.get_extra_info("peercert"))
            _log.info("tunnel_up", node_id=self._identity.node_id)
            await mux.run()
            _log.info("tunnel_closed", code=connection.close_code)
        finally:
            mux.close()

    def _accept(self, stream: Stream, frame: Open) -> None:
        task = asyncio.create_task(self._serve(stream, frame), name=f"stream-{frame.stream}")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, stream: Stream, frame: Open) -> None:
        try:
            if isinstance(frame.target, UnitPort):
                _join_port(stream, await self._units.connect_port(frame.target.unit_id, frame.target.port))
            else:
                await _Command(stream).run(self._units, frame.target)
        except NodeError as error:
            stream.abort(error.code, error.detail)
        except OSError as error:
            stream.abort("refused", error.strerror or str(error))
        except Exception:  # noqa: BLE001 (supervises one stream: the tunnel goes on)
            _log.exception("stream_failed")
            stream.abort("cancelled", "internal error")


def _join_port(stream: Stream, connected: socket.socket) -> None:
    """From now on the socket's transport and the stream drive each other; no task is needed."""
    if stream.error is not None:
        connected.close()
        return
    try:
        ForeignTransport(connected, Pump(stream))
    except BaseException:
        connected.close()
        raise


class _Output(asyncio.Protocol):
    """One of a command's outputs."""

    def __init__(self, stream: Stream, channel: int) -> None:
        self._stream = stream
        self._channel = channel
        self.bytes = 0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Pass on."""
        self.bytes += len(data)
        with suppress(StreamAborted):
            self._stream.write(data, self._channel)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Nobody holds the other end any more."""
        if not self.closed.done():
            self.closed.set_result(None)


class _Input(asyncio.Protocol):
    """A command's standard input."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def pause_writing(self) -> None:
        """The command reads slowly."""
        self._stream.pause()

    def resume_writing(self) -> None:
        """The command reads again."""
        self._stream.resume()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The command closed its input: what still comes is dropped."""
        self._stream.resume()


class _Command:
    """A command's three pipes joined to a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._blocked = False
        self._execution: Execution | None = None
        self._stdin: asyncio.WriteTransport | None = None
        self._outputs: list[tuple[asyncio.ReadTransport, _Output]] = []

    async def run(self, units: Units, target: UnitExec) -> None:
        """Run it to its end."""
        inside, ours = _pipes()
        try:
            self._execution = await units.execute(
                target.unit_id,
                argv=target.argv,
                env=target.env,
                cwd=target.cwd,
                stdin=inside[0],
                stdout=inside[1],
                stderr=inside[2],
            )
        except BaseException:
            _close(ours)
            raise
        finally:
            _close(inside)
        await self._connect(ours)
        self._stream.attach(self)
        try:
            ended = await self._execution.wait()
            self._execution = None
            await self._finish(ended)
        finally:
            self._close()

    async def _connect(self, ours: tuple[int, int, int]) -> None:
        loop = asyncio.get_running_loop()
        self._stdin, _ = await loop.connect_write_pipe(lambda: _Input(self._stream), os.fdopen(ours[0], "wb", 0))
        for channel, descriptor in ((STDOUT, ours[1]), (STDERR, ours[2])):
            output = _Output(self._stream, channel)
            transport, _ = await loop.connect_read_pipe(lambda output=output: output, os.fdopen(descriptor, "rb", 0))
            self._outputs.append((transport, output))

    async def _finish(self, ended: ExecExit) -> None:
        """Send what is left of the output, then how the command ended."""
        seen = -1
        while not all(output.closed.done() for _, output in self._outputs):
            total = sum(output.bytes for _, output in self._outputs)
            if self._stream.error is not None or (total == seen and not self._blocked):
                # A process that outlived the command holds the pipe; its output is not the command's any more.
                break
            seen = total
            await asyncio.wait([output.closed for _, output in self._outputs], timeout=_LINGER_S)
        with suppress(StreamAborted):
            self._stream.write(msgspec.msgpack.encode(ended), CONTROL)
            self._stream.end()

    def _close(self) -> None:
        if self._stdin is not None:
            self._stdin.abort()
        for transport, _ in self._outputs:
            transport.close()

    def data(self, channel: int, payload: bytes) -> None:
        """To the command's standard input."""
        if channel != STDIN:
            raise StreamAborted("protocol", f"channel {channel} does not lead into a command")
        if self._stdin is not None and not self._stdin.is_closing():
            self._stdin.write(payload)

    def ended(self) -> None:
        """No more input."""
        if self._stdin is not None and not self._stdin.is_closing():
            self._stdin.close()

    def aborted(self, error: StreamAborted) -> None:  # noqa: ARG002
        """Nobody waits for the command."""
        if self._execution is not None:
            self._execution.kill()

    def blocked(self) -> None:
        """The caller reads slowly: so does the pipe, and the command waits."""
        self._blocked = True
        self._each_output("pause_reading")

    def writable(self) -> None:
        """The caller reads again."""
        self._blocked = False
        self._each_output("resume_reading")

    def _each_output(self, method: str) -> None:
        for transport, _ in self._outputs:
            if not transport.is_closing():
                getattr(transport, method)()


def _pipes() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The command's ends and ours, each in the order input, output, error."""
    stdin_read, stdin_write = os.pipe2(os.O_CLOEXEC)
    stdout_read, stdout_write = os.pipe2(os.O_CLOEXEC)
    stderr_read, stderr_write = os.pipe2(os.O_CLOEXEC)
    return (stdin_read, stdout_write, stderr_write), (stdin_write, stdout_read, stderr_read)


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)

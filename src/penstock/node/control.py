"""The agent's end of a unit's control socket; `init.py` is the other.

What comes back is a tenant's word: sizes, numbers and descriptors are checked before use.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.node.drivers import memory_file
from penstock.node.errors import NodeError, Refused, Unlinked

SOCKET: Final = "control"
REQUEST_BYTES_MAX: Final = 128 << 10
_PACKET_BYTES_MAX: Final = 256 << 10
_ANSWER_TIMEOUT_S: Final = 10.0
_PENDING_MAX: Final = 1024
_DESCRIPTORS_MAX: Final = 1
_EXIT_CODE_MAX: Final = 255
_CODES: Final = {2: "not_found", 7: "too_large", 13: "not_executable", 17: "taken"}


@dataclass(frozen=True)
class Ending:
    """How a command ended: 128 + the signal when one killed it."""

    code: int
    signalled: bool


@dataclass(frozen=True)
class Greeting:
    """What init says first. `main` is how the unit's own command ended, if it has; `tenant` is whom a stock unit was
    handed to, and `warm` whether its zygote waits."""

    running: bool
    main: Ending | None
    tenant: str = ""
    warm: bool = False


def listen(folder: Path) -> socket.socket:
    """The control socket, made by us outside the sandbox: the path is never visible inside."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    (folder / SOCKET).unlink(missing_ok=True)
    with _Folder(folder) as short:
        listener.bind(f"{short}/{SOCKET}")
    (folder / SOCKET).chmod(0o600)
    listener.listen(8)
    return listener


class _Folder:
    """A folder by a path that is always short enough for a socket's address."""

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)

    def __enter__(self) -> str:
        return f"/proc/self/fd/{self._descriptor}"

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


class Control:
    """A connection to one unit's init."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        on_exit: Callable[[Ending], None],
        on_log: Callable[[str, int, bytes], None],
        on_dial: Callable[[int], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._socket = connection
        self._on_exit = on_exit
        self._on_log = on_log
        self._on_dial = on_dial
        self._on_lost = on_lost
        self._next = 0
        self._kills: set[asyncio.Task[str]] = set()
        self._endings: dict[str, asyncio.Future[Ending]] = {}
        self._answers: dict[str, asyncio.Future[tuple[str, list[int]]]] = {}
        self._greeting: asyncio.Future[Greeting] = asyncio.get_running_loop().create_future()
        self._open = True
        asyncio.get_running_loop().add_reader(connection.fileno(), self._readable)

    async def greeting(self, timeout_s: float) -> Greeting:
        """Wait until init is ready; Unlinked when it ends first or takes too long."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._greeting), timeout_s)
        except TimeoutError:
            raise Unlinked("init_silent", f"the unit's init did not answer within {timeout_s:.0f} s") from None

    async def connect(self, port: int) -> socket.socket:
        """A TCP connection on the unit's loopback; Refused when nothing listens there."""
        _, descriptors = await self._answered("connect", str(port))
        connection = tcp_connection(descriptors[0]) if descriptors else None
        if connection is None:
            raise Unlinked("init_broken", "the unit's init sent no TCP connection")
        return connection

    async def execute(
        self, argv: Sequence[str], env: dict[str, str], cwd: str, descriptors: Sequence[int]
    ) -> tuple[str, asyncio.Future[Ending]]:
        """Start a command; its name for `kill`, and how it will have ended."""
        name = str(self._next + 1)
        ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._endings[name] = ending
        pairs = [f"{key}={value}" for key, value in env.items()]
        try:
            await self._ask("exec", cwd, str(len(argv)), *argv, *pairs, descriptors=descriptors)
        except BaseException:
            self._endings.pop(name, None)
            raise
        return name, ending

    async def handoff(self, allocation_id: str, content: bytes, *, sent: Callable[[], None]) -> bool:
        """Give the unit to its tenant (`tenant.content`); whether it had been given to the same one before. Refused
        `taken` when it is another's."""
        memory = memory_file(content)
        try:
            answer = await self._ask("handoff", allocation_id, descriptors=[memory], sent=sent)
        finally:
            os.close(memory)
        return answer == "before"

    def kill(self, name: str, number: int) -> None:
        """Signal a command and what it started, without waiting for it."""
        if not self._open:
            return
        task = asyncio.create_task(self._ask("kill", name, str(number)), name="kill")
        self._kills.add(task)
        task.add_done_callback(self._killed)

    def _killed(self, task: asyncio.Task[str]) -> None:
        self._kills.discard(task)
        if not task.cancelled():
            task.exception()

    async def stop(self) -> None:
        """Ask everything in the unit to end; init leaves when it has."""
        await self._ask("stop")

    async def ping(self) -> None:
        """Wait for any answer."""
        await self._ask("ping")

    async def _ask(
        self, verb: str, *fields: str, descriptors: Sequence[int] = (), sent: Callable[[], None] = lambda: None
    ) -> str:
        """The answer to a question that no descriptor answers; one that comes all the same is not kept open."""
        answer, unwanted = await self._answered(verb, *fields, descriptors=descriptors, sent=sent)
        _close(unwanted)
        return answer

    async def _answered(
        self, verb: str, *fields: str, descriptors: Sequence[int] = (), sent: Callable[[], None] = lambda: None
    ) -> tuple[str, list[int]]:
        packet = self._encode(verb, fields)
        request = str(self._next)
        answer: asyncio.Future[tuple[str, list[int]]] = asyncio.get_running_loop().create_future()
        self._answers[request] = answer
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await self._send(packet, descriptors)
                sent()
                return await asyncio.shield(answer)
        except (TimeoutError, asyncio.CancelledError) as error:
            # It may have come at the very moment.
            _close(answer.result()[1] if answer.done() and not answer.exception() else ())
            if isinstance(error, asyncio.CancelledError):
                raise
            raise Unlinked("init_silent", "the unit's init does not answer") from None
        finally:
            self._answers.pop(request, None)

    def _encode(self, verb: str, fields: Sequence[str]) -> bytes:
        if not self._open or len(self._answers) >= _PENDING_MAX:
            raise Unlinked("init_gone", "the unit's init is not connected")
        self._next += 1
        packet = "\0".join((verb, str(self._next), *fields)).encode(errors="surrogateescape")
        if packet.count(b"\0") != len(fields) + 1:
            raise Refused("malformed", "arguments and variables cannot hold a zero byte")
        if len(packet) > REQUEST_BYTES_MAX:
            raise Refused("too_large", f"arguments and variables exceed {REQUEST_BYTES_MAX} bytes")
        return packet

    async def _send(self, packet: bytes, descriptors: Sequence[int]) -> None:
        while not self._sent(packet, descriptors):  # noqa: ASYNC110 - init's buffer is full, which is rare and short
            await asyncio.sleep(0.005)

    def _sent(self, packet: bytes, descriptors: Sequence[int]) -> bool:
        try:
            socket.send_fds(self._socket, [packet], list(descriptors))
        except BlockingIOError:
            return False
        except OSError as error:
            raise Unlinked("init_gone", "the unit's init has ended") from error
        return True

    def _readable(self) -> None:
        try:
            packet, descriptors, _, _ = socket.recv_fds(
                self._socket, _PACKET_BYTES_MAX, _DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            packet, descriptors = b"", []
        if not packet:
            self.close()
            self._on_lost()
            return
        if not self._dispatch(packet, descriptors):
            _close(descriptors)

    def _dispatch(self, packet: bytes, descriptors: list[int]) -> bool:
        """Whether somebody took the descriptors."""
        verb, _, rest = packet.partition(b"\0")
        try:
            if verb == b"log":
                stream, dropped, chunk = rest.split(b"\0", 2)
                self._on_log(stream.decode(), int(dropped), chunk)
                return False
            fields = rest.decode(errors="replace").split("\0")
            return self._event(verb, fields, descriptors)
        except (ValueError, IndexError):
            return False

    def _event(self, verb: bytes, fields: list[str], descriptors: list[int]) -> bool:
        if verb == b"hello":
            ending = _ending(fields[2], fields[3]) if fields[1] == "exited" else None
            if not self._greeting.done():
                # Units that an older agent started say less.
                tenant, warm = fields[4:6] if len(fields) > 5 else ("", "0")
                self._greeting.set_result(Greeting(fields[1] == "running", ending, tenant, warm == "1"))
        elif verb == b"dial":
            if descriptors:
                self._on_dial(descriptors[0])
            return bool(descriptors)
        elif verb == b"exit":
            self._ended(fields[0], _ending(fields[1], fields[2]))
        elif (answer := self._answers.get(fields[0])) is not None and not answer.done():
            if verb == b"ok":
                answer.set_result((fields[1], descriptors))
                return True
            answer.set_exception(_refusal(int(fields[1]), fields[2]))
        return False

    def _ended(self, name: str, ending: Ending) -> None:
        if name == "main":
            self._on_exit(ending)
        elif (waiting := self._endings.pop(name, None)) is not None and not waiting.done():
            waiting.set_result(ending)

    def close(self) -> None:
        """Hang up; whoever waits is told."""
        if not self._open:
            return
        self._open = False
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        gone = Unlinked("init_gone", "the unit's init has ended")
        for waiting in (self._greeting, *self._answers.values(), *self._endings.values()):
            if not waiting.done():
                waiting.set_exception(gone)
                waiting.exception()


def _ending(code: str, signalled: str) -> Ending:
    """A code that no process can end with is none: it would fit no message."""
    if not 0 <= int(code) <= _EXIT_CODE_MAX:
        raise ValueError(code)
    return Ending(int(code), signalled == "1")


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def tcp_connection(descriptor: int) -> socket.socket | None:
    """The TCP connection that a unit passed. It may pass anything: whatever else it is gets closed."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        return None
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        connection.close()
        return None
    connection.setblocking(False)
    return connection


def _refusal(number: int, detail: str) -> NodeError:
    return Refused(_CODES.get(number, "refused"), detail[:200])


def dial(
    folder: Path,
    *,
    on_exit: Callable[[Ending], None],
    on_log: Callable[[str, int, bytes], None],
    on_dial: Callable[[int], None],
    on_lost: Callable[[], None],
) -> Control:
    """Connect to the init that listens in `folder`; Unlinked when none does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    try:
        with _Folder(folder) as short:
            connection.connect(f"{short}/{SOCKET}")
    except OSError as error:
        connection.close()
        raise Unlinked("init_gone", f"no init listens in {folder.name}: {error.strerror}") from error
    return Control(connection, on_exit=on_exit, on_log=on_log, on_dial=on_dial, on_lost=on_lost)

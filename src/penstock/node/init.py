"""The first process inside a unit: runs commands, opens ports, reaps. It runs under the tenant's interpreter (`-I -S`).

It imports only what is compiled into the interpreter, because every further module delays each unit's start; hence the
underscored modules and the plain protocol (`control.py` is its other end): one packet is one message, its fields
separated by zero bytes, file descriptors beside it. Nothing here is trusted by the agent: tenant code runs as the same
user. EOF before the whole configuration has come means that the agent died: leave at once.
"""
# ruff: noqa: SIM105, S606 - contextlib would have to be imported; running commands is what this is for

import _signal  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
import _socket
import errno
import os
import resource
import select
import sys
from _collections_abc import Callable

VERSION = b"1"
_PACKET_BYTES_MAX = 256 << 10
_LOG_CHUNK_BYTES = 32 << 10
_LOG_BACKLOG_BYTES = 1 << 20
_LAST_READS_MAX = 64
_OUTGOING_MAX = 1024
_SYN_RETRIES = 2
_SIGKILL, _SIGPIPE, _SIGTERM, _SIGCHLD, _SIGXFSZ = 9, 13, 15, 17, 25


class Init:
    """One unit's commands and the agent's connection."""

    def __init__(self, listener: _socket.socket, env: dict[bytes, bytes], *, isolated: bool) -> None:
        self.listener = listener
        self.env = env
        self.isolated = isolated
        self.poller = select.poll()
        self.handlers: dict[int, Callable[[int], object]] = {}
        self.connection: _socket.socket | None = None
        self.outgoing: list[tuple[bytes, list[int]]] = []
        self.children: dict[int, bytes] = {}
        self.logs: list[tuple[bytes, bytes]] = []
        self.log_bytes = self.log_dropped = 0
        self.outputs: list[tuple[bytes, int]] = []
        self.main = (b"none", b"0", b"0")
        self.stopping = False

    def run(self, command: list[bytes]) -> None:
        """Serve until asked to stop."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        _signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        # Without a handler of its own the signal would not reach the wake-up pipe.
        _signal.signal(_SIGCHLD, lambda _number, _frame: None)  # pyright: ignore[reportUnknownLambdaType]
        self.watch(wake_read, select.POLLIN, lambda _: os.read(wake_read, 4096))
        if command:
            self.start_main(command)
        self.listener.setblocking(False)
        self.watch(self.listener.fileno(), select.POLLIN, lambda _: self.accept())
        while not (self.stopping and not self.reap()):
            self.turn()

    def turn(self) -> None:
        """Wait for something and act on it."""
        for descriptor, event in self.poller.poll(50 if self.stopping else None):
            if descriptor in self.handlers:
                self.handlers[descriptor](event)
        self.reap()
        self.flush()

    def watch(self, descriptor: int, events: int, handler: Callable[[int], object]) -> None:
        """Call `handler` on these events."""
        self.handlers[descriptor] = handler
        self.poller.register(descriptor, events)

    def unwatch(self, descriptor: int) -> None:
        """Stop watching."""
        if self.handlers.pop(descriptor, None) is not None:
            self.poller.unregister(descriptor)

    def accept(self) -> None:
        """A new agent takes over from the one before it."""
        try:
            descriptor, _ = self.listener._accept()  # pyright: ignore[reportAttributeAccessIssue]  # noqa: SLF001
        except OSError:
            return
        self.disconnect()
        self.connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, descriptor)
        self.connection.setblocking(False)
        self.watch(descriptor, select.POLLIN, self.serve)
        self.send(b"hello", VERSION, *self.main)

    def disconnect(self) -> None:
        """Commands belong to the connection that asked for them; the unit's own command does not."""
        if self.connection is None:
            return
        self.unwatch(self.connection.fileno())
        self.connection.close()
        self.connection = None
        for _, descriptors in self.outgoing:
            close_all(descriptors)
        self.outgoing.clear()
        for pid, name in self.children.items():
            if name != b"main":
                signal_group(pid, _SIGKILL)

    def send(self, *fields: bytes, descriptors: list[int] | None = None) -> None:
        """Queue a message; the descriptors are closed once sent."""
        if self.connection is None or len(self.outgoing) >= _OUTGOING_MAX:
            close_all(descriptors or [])
            return
        self.outgoing.append((b"\0".join(fields), descriptors or []))

    def flush(self) -> None:
        """Send what the socket takes: answers first, then output."""
        while self.connection is not None and (self.outgoing or self.logs):
            message, descriptors = self.outgoing[0] if self.outgoing else (b"", [])
            if not message:
                stream, chunk = self.logs[0]
                message = b"\0".join((b"log", stream, b"%d" % self.log_dropped, chunk)) if stream else chunk
            packed = b"".join(descriptor.to_bytes(4, sys.byteorder) for descriptor in descriptors)
            rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)] if descriptors else []
            try:
                self.connection.sendmsg([message], rights)
            except BlockingIOError:
                self.poller.modify(self.connection.fileno(), select.POLLIN | select.POLLOUT)
                return
            except OSError:
                self.disconnect()
                return
            self.sent()
        if self.connection is not None:
            self.poller.modify(self.connection.fileno(), select.POLLIN)

    def sent(self) -> None:
        """The message at the head has left."""
        if self.outgoing:
            close_all(self.outgoing.pop(0)[1])
            return
        self.log_bytes -= len(self.logs.pop(0)[1])
        self.log_dropped = 0

    def serve(self, event: int) -> None:
        """One request of the agent's."""
        if self.connection is None or not event & ~select.POLLOUT:
            return
        try:
            packet, ancillary, _, _ = self.connection.recvmsg(
                _PACKET_BYTES_MAX, _socket.CMSG_SPACE(12), _socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            packet, ancillary = b"", []
        if not packet:
            self.disconnect()
            return
        packed = b"".join(payload for _, kind, payload in ancillary if kind == _socket.SCM_RIGHTS)
        descriptors = [int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4)]
        fields = packet.split(b"\0")
        try:
            self.act(fields[0], fields[1], fields[2:], descriptors)
        except OSError as error:
            self.send(b"error", fields[1], b"%d" % (error.errno or 0), os.strerror(error.errno or 0).encode())
        except (ValueError, IndexError):
            self.send(b"error", fields[1] if len(fields) > 1 else b"", b"22", b"malformed request")
        finally:
            close_all(descriptors)

    def act(self, verb: bytes, request: bytes, fields: list[bytes], descriptors: list[int]) -> None:
        """Carry out a request and answer it."""
        if verb == b"connect":
            self.connect(request, int(fields[0]), _socket.AF_INET)
        elif verb == b"exec":
            end = 2 + int(fields[1])
            pid = spawn(fields[2:end], self.env | pairs(fields[end:]), fields[0], descriptors)
            self.children[pid] = request
            self.send(b"ok", request, b"%d" % pid)
        elif verb == b"kill":
            for pid, name in self.children.items():
                if name == fields[0]:
                    signal_group(pid, int(fields[1]))
            self.send(b"ok", request, b"")
        elif verb == b"stop":
            self.stopping = True
            self.signal_everyone(_SIGTERM)
            self.send(b"ok", request, b"")
        else:
            self.send(b"ok", request, b"")

    def connect(self, request: bytes, port: int, family: int) -> None:
        """Open a TCP connection on the unit's loopback, without waiting for it here."""
        attempt = _socket.socket(family, _socket.SOCK_STREAM, 0)
        attempt.setblocking(False)
        # A full backlog would otherwise hold an attempt for minutes.
        attempt.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_SYNCNT, _SYN_RETRIES)
        host = "127.0.0.1" if family == _socket.AF_INET else "::1"
        code = attempt.connect_ex((host, port))
        if code != errno.EINPROGRESS:
            self.connected(request, port, attempt, code)
            return
        self.watch(
            attempt.fileno(),
            select.POLLOUT,
            lambda _: self.connected(request, port, attempt, attempt.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR)),
        )

    def connected(self, request: bytes, port: int, attempt: _socket.socket, code: int) -> None:
        """Hand over the connection, or try the other family, or say why not."""
        self.unwatch(attempt.fileno())
        if code == 0:
            self.send(b"ok", request, b"", descriptors=[attempt.detach()])
            return
        again = attempt.family == _socket.AF_INET
        attempt.close()
        if again:
            self.connect(request, port, _socket.AF_INET6)
            return
        self.send(b"error", request, b"%d" % code, os.strerror(code).encode())

    def start_main(self, command: list[bytes]) -> None:
        """Start the unit's own command with its output on pipes that we read."""
        sink = os.open("/dev/null", os.O_RDONLY)
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        try:
            pid = spawn(command, self.env, b"", [sink, out_write, err_write])
        except OSError as error:
            self.keep_log(b"stderr", f"cannot start: {os.strerror(error.errno or 0)}\n".encode())
            self.main = (b"exited", b"127", b"0")
            close_all([sink, out_read, out_write, err_read, err_write])
            return
        close_all([sink, out_write, err_write])
        self.children[pid] = b"main"
        self.main = (b"running", b"0", b"0")
        self.outputs = [(b"stdout", out_read), (b"stderr", err_read)]
        for stream, descriptor in self.outputs:
            os.set_blocking(descriptor, False)
            self.watch(descriptor, select.POLLIN, lambda _, s=stream, d=descriptor: self.read_log(s, d))

    def read_log(self, stream: bytes, descriptor: int) -> bool:
        """Take output, so that the command never waits for us; whether there was any."""
        try:
            chunk = os.read(descriptor, _LOG_CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self.outputs.remove((stream, descriptor))
            self.unwatch(descriptor)
            os.close(descriptor)
            return False
        self.keep_log(stream, chunk)
        return True

    def keep_log(self, stream: bytes, chunk: bytes) -> None:
        """Keep output until the agent takes it; the oldest goes first when there is too much."""
        self.logs.append((stream, chunk))
        self.log_bytes += len(chunk)
        while self.log_bytes > _LOG_BACKLOG_BYTES:
            self.log_dropped += len(self.logs[0][1])
            self.log_bytes -= len(self.logs.pop(0)[1])

    def reap(self) -> bool:
        """Collect whatever has ended; whether any child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            name = self.children.pop(pid, None)
            if name is not None:
                self.report(name, status)

    def report(self, name: bytes, status: int) -> None:
        """Tell the agent how a command ended. With the unit's own command everything else in the unit ends."""
        signalled = os.WIFSIGNALED(status)
        code = 128 + os.WTERMSIG(status) if signalled else os.WEXITSTATUS(status)
        ending = (b"%d" % code, b"%d" % signalled)
        if name != b"main":
            self.send(b"exit", name, *ending)
            return
        self.main = (b"exited", *ending)
        self.signal_everyone(_SIGKILL)
        for stream, descriptor in list(self.outputs):
            any(not self.read_log(stream, descriptor) for _ in range(_LAST_READS_MAX))
        # In the queue of the output, so that the end is told after the last of it.
        self.keep_log(b"", b"\0".join((b"exit", name, *ending)))

    def signal_everyone(self, number: int) -> None:
        """Signal every process of the unit but this one. Without a pid namespace only our own children are ours."""
        if not self.isolated:
            for pid in self.children:
                signal_group(pid, number)
            return
        try:
            os.kill(-1, number)
        except ProcessLookupError:
            pass


def spawn(argv: list[bytes], env: dict[bytes, bytes], cwd: bytes, descriptors: list[int]) -> int:
    """Start a command in a session of its own; OSError if it cannot be executed."""
    if len(descriptors) != 3 or not argv or not argv[0]:
        raise ValueError
    told_read, told_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        become(argv, env, cwd, descriptors, told_write)
    os.close(told_write)
    told = os.read(told_read, 16)
    os.close(told_read)
    if told:
        os.waitpid(pid, 0)
        raise OSError(int(told), "cannot execute")
    return pid


def become(argv: list[bytes], env: dict[bytes, bytes], cwd: bytes, descriptors: list[int], told: int) -> None:
    """In the child: turn into the command, or tell the parent the error number."""
    try:
        os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        # The interpreter ignores these two, and ignored signals stay so across exec.
        _signal.signal(_SIGPIPE, _signal.SIG_DFL)
        _signal.signal(_SIGXFSZ, _signal.SIG_DFL)
        spare_init()
        os.chdir(cwd or env.get(b"HOME", b"/"))
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(told, b"%d" % (error.errno or errno.EINVAL))
    finally:
        os._exit(127)


def spare_init() -> None:
    """When memory runs out, the command must go before init."""
    try:
        descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(descriptor, b"500")
        os.close(descriptor)
    except OSError:
        pass


def signal_group(pid: int, number: int) -> None:
    """Signal a command and what it started."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def close_all(descriptors: list[int]) -> None:
    """Close them."""
    for descriptor in descriptors:
        os.close(descriptor)


def pairs(fields: list[bytes]) -> dict[bytes, bytes]:
    """`NAME=value` fields as a dictionary."""
    return dict(field.split(b"=", 1) for field in fields if b"=" in field)  # pyright: ignore[reportReturnType, reportArgumentType]


def read_configuration(descriptor: int) -> list[bytes]:
    """Eight digits of length, then that many bytes; leaves if they don't all come."""
    content = b""
    while len(content) < 8 or len(content) < 8 + int(content[:8]):
        chunk = os.read(descriptor, 1 << 20)
        if not chunk:
            os._exit(3)
        content += chunk
    return content[8:].split(b"\0")


def main() -> None:
    """argv[1] is the listening control socket."""
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, int(sys.argv[1]))
    os.set_inheritable(listener.fileno(), False)
    # Whatever else was open where the agent was started must not be open in a unit.
    os.closerange(3, listener.fileno())
    os.closerange(listener.fileno() + 1, 1 << 16)
    isolated, processes, files, file_bytes, address_space, count, *rest = read_configuration(0)
    for number in (0, 1, 2):
        os.close(number)
        os.open("/dev/null", os.O_RDWR)
    os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kinds = (resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS)
    for kind, value in zip(kinds, map(int, (processes, files, file_bytes, address_space)), strict=True):
        hard = resource.getrlimit(kind)[1]
        ceiling = min(value or hard, hard) if hard >= 0 else value or hard
        resource.setrlimit(kind, (ceiling, ceiling))
    Init(listener, pairs(rest[int(count) :]), isolated=isolated == b"1").run(rest[: int(count)])


if __name__ == "__main__":
    main()

"""The first process inside a unit: runs commands, opens ports, reaps. It runs under the tenant's interpreter (`-I -S`).

It imports only what is compiled into the interpreter, because every further module delays each unit's start; hence the
underscored modules and the plain protocol (`control.py` is its other end): one packet is one message, its fields
separated by zero bytes, file descriptors beside it. Nothing here is trusted by the agent: tenant code runs as the same
user. EOF before the whole configuration has come means that the agent died: leave at once.

A stock unit has no tenant until its one handoff. Init keeps the tenant's name: the same one may ask again, another one
never gets in.
"""
# ruff: noqa: SIM105 - contextlib would have to be imported

import _signal  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
import _socket
import errno
import os
import select
import sys
from _collections_abc import Callable

from penstock.node.commands import (
    Backlog,
    Content,
    Zygote,
    close_all,
    keep_secrets,
    limit,
    pairs,
    read_content,
    signal_group,
    spawn,
)

VERSION = b"2"
_PACKET_BYTES_MAX = 256 << 10
_LOG_CHUNK_BYTES = 32 << 10
_LAST_READS_MAX = 64
_OUTGOING_MAX = 1024
_SYN_RETRIES = 2
_SIGKILL, _SIGTERM, _SIGCHLD = 9, 15, 17


class Init:
    """One unit's commands and the agent's connection."""

    def __init__(self, listener: _socket.socket, secrets: bytes, *, isolated: bool) -> None:
        self.listener = listener
        self.secrets = secrets
        self.isolated = isolated
        self.env: dict[bytes, bytes] = {}
        self.tenant = b""
        self.served = False
        self.zygote: Zygote | None = None
        self.poller = select.poll()
        self.handlers: dict[int, Callable[[int], object]] = {}
        self.connection: _socket.socket | None = None
        self.outgoing: list[tuple[bytes, list[int]]] = []
        self.children: dict[int, bytes] = {}
        self.logs = Backlog()
        self.outputs: list[tuple[bytes, int]] = []
        self.main = (b"none", b"0", b"0")
        self.stopping = False

    def run(self, content: Content, zygote: list[bytes]) -> None:
        """Serve until asked to stop. With a zygote, the agent is answered when that is ready."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        _signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        # Without a handler of its own the signal would not reach the wake-up pipe.
        _signal.signal(_SIGCHLD, lambda _number, _frame: None)  # pyright: ignore[reportUnknownLambdaType]
        self.watch(wake_read, select.POLLIN, lambda _: os.read(wake_read, 4096))
        self.give(content)
        self.listener.setblocking(False)
        if zygote:
            self.warm(zygote)
        else:
            self.listen()
        while not (self.stopping and not self.reap()):
            self.turn()

    def listen(self) -> None:
        """Answer the agent from now on."""
        self.watch(self.listener.fileno(), select.POLLIN, lambda _: self.accept())

    def warm(self, argv: list[bytes]) -> None:
        """Start the zygote."""
        zygote = self.zygote = Zygote(argv, self.env)
        self.children[zygote.pid] = b"zygote"
        self.watch(zygote.socket.fileno(), select.POLLIN, lambda _: self.warmed(zygote))

    def warmed(self, zygote: Zygote) -> None:
        """The zygote is ready or has ended."""
        self.unwatch(zygote.socket.fileno())
        if not zygote.is_ready():
            zygote.end(kill=True)
            self.zygote = None
        self.listen()

    def give(self, content: Content) -> None:
        """Keep what a tenant brought, and start its command. The secrets are there before it, and what the driver set
        stays as it is."""
        self.env = content.env | self.env
        if content.secrets:
            keep_secrets(self.secrets, content.secrets)
        if self.isolated and b"PENSTOCK_EGRESS" in content.env:
            self.open_egress(content.env[b"PENSTOCK_EGRESS"])
        if content.command:
            self.start_main(content.command)

    def open_egress(self, address: bytes) -> None:
        """Listen where the unit's proxy is said to be; the agent carries what comes."""
        listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM, 0)
        listener.bind(("127.0.0.1", int(address.rpartition(b":")[2])))
        listener.listen(64)
        listener.setblocking(False)
        self.watch(listener.fileno(), select.POLLIN, lambda _: self.pass_out(listener))

    def pass_out(self, listener: _socket.socket) -> None:
        """Give the agent a connection to the proxy; without an agent it is closed."""
        try:
            descriptor, _ = listener._accept()  # pyright: ignore[reportAttributeAccessIssue]  # noqa: SLF001
        except OSError:
            return
        self.send(b"dial", b"", descriptors=[descriptor])

    def hand_over(self, tenant: bytes, descriptors: list[int]) -> bytes:
        """Take in the unit's one tenant; says whether that was done before."""
        if self.tenant not in (b"", tenant):
            raise OSError(errno.EEXIST, "taken")
        if self.served:
            return b"before"
        self.tenant = self.env[b"PENSTOCK_ALLOCATION"] = tenant
        self.give(Content(*read_content(descriptors[0])))
        if self.zygote is not None:
            self.zygote.end(kill=True)
            self.zygote = None
        self.served = True
        return b"now"

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
        self.send(b"hello", VERSION, *self.main, self.tenant, b"%d" % (self.zygote is not None))

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
            if name not in (b"main", b"zygote"):
                signal_group(pid, _SIGKILL)

    def send(self, *fields: bytes, descriptors: list[int] | None = None) -> None:
        """Queue a message; the descriptors are closed once sent."""
        if self.connection is None or len(self.outgoing) >= _OUTGOING_MAX:
            close_all(descriptors or [])
            return
        self.outgoing.append((b"\0".join(fields), descriptors or []))

    def flush(self) -> None:
        """Send what the socket takes: answers first, then output."""
        while self.connection is not None and (self.outgoing or self.logs.chunks):
            message, descriptors = self.outgoing[0] if self.outgoing else (self.logs.first(), [])
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
            if self.outgoing:
                close_all(self.outgoing.pop(0)[1])
            else:
                self.logs.drop_first()
        if self.connection is not None:
            self.poller.modify(self.connection.fileno(), select.POLLIN)

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
        except (ValueError, IndexError, EOFError):
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
        elif verb == b"handoff":
            self.send(b"ok", request, self.hand_over(fields[0], descriptors))
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
            pid = self.start(command, [sink, out_write, err_write])
        except OSError as error:
            self.logs.keep(b"stderr", f"cannot start: {os.strerror(error.errno or 0)}\n".encode())
            close_all([sink, out_read, out_write, err_read, err_write])
            self.main_ended(b"127", b"0")
            return
        close_all([sink, out_write, err_write])
        self.children[pid] = b"main"
        self.main = (b"running", b"0", b"0")
        self.outputs = [(b"stdout", out_read), (b"stderr", err_read)]
        for stream, descriptor in self.outputs:
            os.set_blocking(descriptor, False)
            self.watch(descriptor, select.POLLIN, lambda _, s=stream, d=descriptor: self.read_log(s, d))

    def start(self, command: list[bytes], descriptors: list[int]) -> int:
        """The zygote becomes the command if it can; it is this process's child either way."""
        zygote, self.zygote = self.zygote, None
        if zygote is not None and zygote.take(command, self.env, descriptors):
            return zygote.pid
        return spawn(command, self.env, b"", descriptors)

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
        self.logs.keep(stream, chunk)
        return True

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
        if name == b"zygote":
            return
        if name == b"main":
            self.main_ended(*ending)
        else:
            self.send(b"exit", name, *ending)

    def main_ended(self, code: bytes, signalled: bytes) -> None:
        """Keep how the unit's own command ended, behind the last of its output."""
        self.main = (b"exited", code, signalled)
        self.signal_everyone(_SIGKILL)
        for stream, descriptor in list(self.outputs):
            any(not self.read_log(stream, descriptor) for _ in range(_LAST_READS_MAX))
        self.logs.keep(b"", b"\0".join((b"exit", b"main", code, signalled)))

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


def main() -> None:
    """argv[1] is the listening control socket."""
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, int(sys.argv[1]))
    os.set_inheritable(listener.fileno(), False)
    # Whatever else was open where the agent was started must not be open in a unit.
    os.closerange(3, listener.fileno())
    os.closerange(listener.fileno() + 1, 1 << 16)
    try:
        fields, blob = read_content(0)
    except EOFError:
        os._exit(3)
    for number in (0, 1, 2):
        os.close(number)
        os.open("/dev/null", os.O_RDWR)
    os.umask(0o022)
    isolated, secrets = fields[0], fields[1]
    limit(*fields[2:6])
    rest = 7 + int(fields[6])
    Init(listener, secrets, isolated=isolated == b"1").run(Content(fields[rest:], blob), fields[7:rest])


if __name__ == "__main__":
    main()

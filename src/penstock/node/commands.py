"""How init starts commands, keeps output and secrets, and reads what the agent sends: its half without a connection.

`inside.py` joins this file and `init.py` into one, so the same holds: only what is compiled into the interpreter may be
imported, and names must differ from init's.
"""
# ruff: noqa: SIM105, PTH102, PTH108, S606 - contextlib and pathlib would have to be imported; commands are to be run

import _signal  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
import _socket
import errno
import os
import resource
import sys

_SIGKILL, _SIGPIPE, _SIGXFSZ = 9, 13, 25
_ZYGOTE_S = 2.0
_BACKLOG_BYTES_MAX = 1 << 20


class Content:
    """What a tenant brings to a unit: its command, its variables and its secrets."""

    def __init__(self, fields: list[bytes], blob: bytes) -> None:
        count = int(fields[0])
        self.command = fields[1 : 1 + count]
        named = 2 + count + 2 * int(fields[1 + count])
        secrets = fields[2 + count : named]
        self.env = pairs(fields[named:])
        self.secrets: dict[bytes, bytes] = {}
        at = 0
        for name, size in zip(secrets[::2], map(int, secrets[1::2]), strict=True):
            self.secrets[name] = blob[at : at + size]
            at += size


class Backlog:
    """Output that the agent has not taken yet. The oldest goes first when there is too much."""

    def __init__(self) -> None:
        self.chunks: list[tuple[bytes, bytes]] = []
        self.size = self.dropped = 0

    def keep(self, stream: bytes, chunk: bytes) -> None:
        """A piece of output; without a stream it is a message that must come behind all output before it."""
        self.chunks.append((stream, chunk))
        self.size += len(chunk)
        while self.size > _BACKLOG_BYTES_MAX:
            self.dropped += len(self.chunks[0][1])
            self.size -= len(self.chunks.pop(0)[1])

    def first(self) -> bytes:
        """The next message."""
        stream, chunk = self.chunks[0]
        return b"\0".join((b"log", stream, b"%d" % self.dropped, chunk)) if stream else chunk

    def drop_first(self) -> None:
        """It has left."""
        self.size -= len(self.chunks.pop(0)[1])
        self.dropped = 0


class Zygote:
    """An interpreter of the tenant's kind with much imported (`zygote.py`). It becomes one command, or ends."""

    def __init__(self, argv: list[bytes], env: dict[bytes, bytes]) -> None:
        self.socket, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0)
        os.set_inheritable(theirs.fileno(), True)
        sink = os.open("/dev/null", os.O_RDWR)
        python = os.fsencode(sys.executable)
        self.pid = spawn([python, argv[0], b"%d" % theirs.fileno(), *argv[1:]], env, b"", [sink, sink, sink])
        os.close(sink)
        theirs.close()

    def is_ready(self) -> bool:
        """Whether it has imported everything; called when it said something or ended."""
        try:
            return self.socket.recv(16) == b"ready"
        except OSError:
            return False

    def take(self, command: list[bytes], env: dict[bytes, bytes], descriptors: list[int]) -> bool:
        """Have it become the command; if it cannot, it is gone and has run nothing."""
        fields = [b"%d" % len(command), *command, *(name + b"=" + value for name, value in env.items())]
        memory = os.memfd_create("command")
        try:
            os.write(memory, b"\0".join(fields))
            self.socket.settimeout(_ZYGOTE_S)
            packed = b"".join(number.to_bytes(4, sys.byteorder) for number in (*descriptors, memory))
            self.socket.sendmsg([b"take"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)])
            taken = self.socket.recv(16) == b"yes"
            # Only this lets it run: an answer that came too late must not start the command a second time.
            if taken:
                self.socket.send(b"go")
        except OSError:
            taken = False
        os.close(memory)
        self.end(kill=not taken)
        return taken

    def end(self, *, kill: bool) -> None:
        """Let go of it."""
        self.socket.close()
        if kill:
            try:
                os.kill(self.pid, _SIGKILL)
            except ProcessLookupError:
                pass


def keep_secrets(folder: bytes, secrets: dict[bytes, bytes]) -> None:
    """Write each secret as a file that only the unit's user can read."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    for name, value in secrets.items():
        path = folder + b"/" + name
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
        try:
            if os.write(descriptor, value) != len(value):
                raise OSError(errno.ENOSPC, "secret")
        finally:
            os.close(descriptor)


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


def read_content(descriptor: int) -> tuple[list[bytes], bytes]:
    """Eight digits each for the lengths of fields and blob, then those; leaves if they don't all come."""
    content = b""
    while len(content) < 16 or len(content) < 16 + int(content[:8]) + int(content[8:16]):
        chunk = os.read(descriptor, 1 << 20)
        if not chunk:
            raise EOFError
        content += chunk
    end = 16 + int(content[:8])
    return content[16:end].split(b"\0"), content[end:]


def limit(processes: bytes, files: bytes, file_bytes: bytes, address_space: bytes) -> None:
    """Limit this process and all that come from it; nought leaves a limit as it is."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kinds = (resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS)
    for kind, value in zip(kinds, map(int, (processes, files, file_bytes, address_space)), strict=True):
        hard = resource.getrlimit(kind)[1]
        ceiling = min(value or hard, hard) if hard >= 0 else value or hard
        resource.setrlimit(kind, (ceiling, ceiling))

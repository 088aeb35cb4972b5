"""The warm interpreter of a stock unit: it has imported what most programs import, and becomes the tenant's command.

It runs inside the sandbox as a child of init, before there is a tenant, and knows only what every command of the unit
sees. On a handoff it either becomes the command itself, exactly as the interpreter would have run it, or says no and
ends, and init executes the command in the ordinary way. So it serves one command of one tenant, and nothing is forked
or shared. Whatever steers an interpreter from its very start (most options and `PYTHON…` variables) is a no.
"""

# ruff: noqa: PTH109, PTH113, PTH117, PTH118, PTH119, PTH120 - paths as the interpreter itself handles them

import atexit
import importlib
import io
import os
import pkgutil
import re
import runpy
import shutil
import signal
import socket
import sys
import textwrap
import threading
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

#: Imported before there is a tenant; the node's configuration adds to them per image.
MODULES = (
    *("argparse", "asyncio", "base64", "collections", "concurrent.futures", "concurrent.futures.thread", "contextlib"),
    *("copy", "csv", "dataclasses", "datetime", "decimal", "email.message", "email.parser", "enum", "functools"),
    *("gzip", "hashlib", "hmac", "http.client", "http.cookies", "http.server", "importlib.metadata", "inspect"),
    *("json", "logging", "math", "multiprocessing", "pathlib", "pickle", "platform", "queue", "random", "secrets"),
    *("selectors", "socketserver", "ssl", "statistics", "string", "struct", "subprocess", "tempfile", "traceback"),
    *("typing", "urllib.request", "uuid", "warnings", "weakref", "zipfile", "zlib"),
)
_COMMAND_BYTES_MAX = 4 << 20
_NAME = re.compile(r"python(3(\.\d+)?)?")
#: Read by the interpreter or its libraries when they start, so a tenant's own value would come too late.
_STEERING = ("PYTHON", "LC_", "LANG", "HOME", "MALLOC_", "GLIBC_", "OPENSSL_")
_UNBUFFERED = "PYTHONUNBUFFERED"


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """An interpreter's command line: `kind` is c, m, or empty for a script."""

    kind: str
    target: str
    arguments: tuple[str, ...]
    unbuffered: bool = False
    no_bytecode: bool = False
    safe_path: bool = False


def parse(arguments: Sequence[str]) -> Invocation | None:
    """What follows the interpreter's name, if it can be done by one that already runs."""
    flags: set[str] = set()
    for at, argument in enumerate(arguments):
        rest = tuple(arguments[at + 1 :])
        if not argument.startswith("-"):
            return _invocation("", argument, rest, flags)
        if argument in ("-", "--") or argument.startswith("--"):
            return None
        for number, letter in enumerate(argument[1:], start=2):
            if letter in "cm":
                attached = argument[number:]
                parts = (attached, *rest) if attached else rest
                return _invocation(letter, parts[0], parts[1:], flags) if parts else None
            if letter not in "uBIPsE":
                return None
            flags.add(letter)
    return None


def _invocation(kind: str, target: str, arguments: tuple[str, ...], flags: set[str]) -> Invocation:
    return Invocation(
        kind=kind,
        target=target,
        arguments=arguments,
        unbuffered="u" in flags,
        no_bytecode="B" in flags,
        safe_path=bool(flags & {"I", "P"}),
    )


def steered(env: Mapping[str, str], own: Mapping[str, str]) -> bool:
    """Whether the variables would have made an interpreter start otherwise than this one did."""
    names = {name for name in (*env, *own) if name.startswith(_STEERING) and name != _UNBUFFERED}
    return any(env.get(name) != own.get(name) for name in names)


def interpreter(name: str, env: Mapping[str, str]) -> str | None:
    """The path by which a command names this very interpreter; None when it names anything else."""
    path = name if "/" in name else shutil.which(name, path=env.get("PATH", os.defpath))
    if path is None or not os.path.isabs(path) or _NAME.fullmatch(os.path.basename(path)) is None:
        return None
    same = os.path.dirname(path) == os.path.dirname(sys.executable)
    return path if same and os.path.realpath(path) == os.path.realpath(sys.executable) else None


def _prepare(argv: Sequence[str], env: Mapping[str, str]) -> Invocation | None:
    """Everything that can still be refused; leaves this process in the command's folder."""
    found = interpreter(argv[0], env)
    invocation = parse(argv[1:])
    if found is None or invocation is None or steered(env, os.environ):
        return None
    try:
        os.chdir(env.get("HOME", "/"))
    except OSError:
        return None
    if not invocation.kind and not _plain_script(invocation.target):
        return None
    sys.executable = found
    return invocation


def _plain_script(path: str) -> bool:
    """A readable source file; folders, archives and compiled files are run in other ways."""
    if path.endswith(".pyc") or not os.path.isfile(path) or not os.access(path, os.R_OK):
        return False
    return pkgutil.get_importer(path) is None


def _wear(argv: Sequence[str], env: Mapping[str, str], invocation: Invocation) -> None:
    """Look as if this interpreter had been started with that command line and environment."""
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    sys.orig_argv = list(argv)
    sys.dont_write_bytecode |= invocation.no_bytecode
    if invocation.unbuffered or env.get(_UNBUFFERED):
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(write_through=True)
        sys.stdout = sys.__stdout__ = _unbuffered(sys.stdout, 1)
        sys.stderr = sys.__stderr__ = _unbuffered(sys.stderr, 2)
    target = invocation.target
    sys.argv = [f"-{invocation.kind}" if invocation.kind else target, *invocation.arguments]
    if not invocation.safe_path:
        first = {"c": "", "m": os.getcwd()}.get(invocation.kind)
        sys.path.insert(0, os.path.dirname(os.path.realpath(target)) if first is None else first)
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    module.__loader__ = importlib.import_module("importlib.machinery").BuiltinImporter
    sys.modules["__main__"] = module


def _unbuffered(stream: TextIO, descriptor: int) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    raw.name = stream.name
    # As the interpreter does: the text layer directly on the unbuffered file.
    made = io.TextIOWrapper(raw, stream.encoding, stream.errors, write_through=True)  # pyright: ignore[reportArgumentType]
    made.mode = "w"  # pyright: ignore[reportAttributeAccessIssue]
    return made


def _execute(invocation: Invocation) -> None:
    namespace = sys.modules["__main__"].__dict__
    if invocation.kind == "m":
        runpy._run_module_as_main(invocation.target)  # pyright: ignore[reportAttributeAccessIssue]  # noqa: SLF001
        return
    if invocation.kind == "c":
        text = invocation.target if sys.version_info < (3, 14) else textwrap.dedent(invocation.target)
        exec(compile(text + "\n", "<string>", "exec", dont_inherit=True), namespace)  # noqa: S102 - what it is for
        return
    path = os.path.join(os.getcwd(), invocation.target)
    loader = importlib.import_module("importlib.machinery").SourceFileLoader("__main__", path)
    namespace.update(__file__=path, __cached__=None, __loader__=loader)
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), namespace)  # noqa: S102 - what it is for


def _run(invocation: Invocation) -> None:
    """Run to the end. SystemExit goes on upwards, where the interpreter itself makes an exit status of it."""
    try:
        _execute(invocation)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the interpreter's own last resort, done in its place
        error.__traceback__ = _without_us(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            _end_by_interrupt()
        raise SystemExit(1) from None


def _without_us(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename == _run.__code__.co_filename:
        traceback = traceback.tb_next
    return traceback


def _end_by_interrupt() -> None:
    """As the interpreter does: clean up, then end by the very signal, so that the parent sees it."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # noqa: SLF001
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
    sys.stdout.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _import_ours(folder: str, names: Sequence[str]) -> dict[str, types.ModuleType]:
    """Import what only programs in `folder` get to see: another command may have a package of the same name."""
    sys.path.insert(0, folder)
    _import(names)
    sys.path.remove(folder)
    ours = {name: module for name, module in sys.modules.items() if _file_of(module).startswith(f"{folder}/")}
    for name in ours:
        del sys.modules[name]
    return ours


def _file_of(module: types.ModuleType) -> str:
    return getattr(module, "__file__", None) or ""


def _import(names: Sequence[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001, S112 - it fails again, and visibly, where the tenant imports it
            continue


def _read(descriptor: int) -> tuple[list[str], dict[str, str]]:
    content = os.pread(descriptor, _COMMAND_BYTES_MAX, 0)
    os.close(descriptor)
    count, *fields = (os.fsdecode(field) for field in content.split(b"\0"))
    env = dict(field.split("=", 1) for field in fields[int(count) :] if "=" in field)
    return fields[: int(count)], env


def _wait(init: socket.socket) -> Invocation | None:
    """Be asked, answer, and get the word to go; None when there is nothing to become."""
    _, descriptors, _, _ = socket.recv_fds(init, 16, 4)
    if len(descriptors) != 4:
        return None
    argv, env = _read(descriptors[3])
    invocation = _prepare(argv, env)
    init.send(b"no" if invocation is None else b"yes")
    if invocation is None or init.recv(16) != b"go":
        return None
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _wear(argv, env, invocation)
    return invocation


def main() -> None:
    """argv[1] is the socket to init, the rest are names of modules; after a folder those of our programs in it."""
    # The folder of this file, which no command's path has.
    del sys.path[0]
    init = socket.socket(fileno=int(sys.argv[1]))
    init.set_inheritable(False)
    names = sys.argv[2:]
    split = next((at for at, name in enumerate(names) if name.startswith("/")), len(names))
    _import((*MODULES, *names[:split]))
    folder = names[split] if split < len(names) else ""
    ours = _import_ours(folder, names[split + 1 :]) if folder else {}
    try:
        init.send(b"ready")
        invocation = _wait(init)
    except OSError:
        return
    init.close()
    if invocation is None:
        return
    if not invocation.kind and os.path.dirname(invocation.target) == folder:
        sys.modules.update(ours)
    _run(invocation)


if __name__ == "__main__":
    main()

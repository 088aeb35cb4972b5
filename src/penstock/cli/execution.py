"""Runs a command in an allocation's sandbox with this terminal's input and output.

The exit code is passed on; 127 says that there is no such command, 126 that it cannot be run. Ctrl-C closes the
connection, which kills the command; a second one leaves at once. The terminal is never put into another mode, so there
is nothing to restore.
"""

import errno
import os
import sys
import threading
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import completing, names
from penstock.cli.errors import NO_COMMAND, NOT_RUNNABLE, CliError
from penstock.cli.session import Session
from penstock.sdk.protocol import identifier
from penstock.wire.tunnel import STDOUT

if TYPE_CHECKING:
    from penstock.sdk.commands import Command
    from penstock.sdk.errors import InvalidRequest


def execute(
    session: Session,
    allocation: Annotated[
        str,
        typer.Argument(
            metavar="ALLOCATION", help="The allocation's name or id (alc_…).", autocompletion=completing.allocations
        ),
    ],
    argv: Annotated[list[str], typer.Argument(help="The command and its arguments, after --.")],
    env: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="A variable; repeat.")] = None,
    cwd: Annotated[str, typer.Option(help="Where it starts.")] = "",
    no_stdin: Annotated[bool, typer.Option("-n", "--no-stdin", help="Give it no input.")] = False,
) -> None:
    """Run a command in the sandbox; its exit code becomes this one's."""
    import asyncio

    from penstock.cli.allocations import pairs
    from penstock.sdk.commands import Command

    words = argv[1:] if argv[:1] == ["--"] else argv
    if not words:
        raise CliError("give a command after --", field="argv")
    variables = pairs(env or [], option="--env")
    command = Command(allocation_id=_id(session, allocation), argv=words, env=variables, cwd=cwd)
    code = asyncio.run(_execute(session, command, read_stdin=not no_stdin))
    raise typer.Exit(code)


def _id(session: Session, text: str) -> str:
    """The allocation's id. Only a name is asked for: an id costs no request."""
    if text.startswith("alc_"):
        return identifier("alc", text, name="allocation")
    with session.client() as client:
        return names.allocation(client, text)


async def _execute(session: Session, command: "Command", *, read_stdin: bool) -> int:
    from penstock.sdk import execute
    from penstock.sdk.client import AsyncClient
    from penstock.sdk.errors import InvalidRequest

    async with AsyncClient(**session.target()) as client:
        stdin = _stdin() if read_stdin else execute.once(b"")
        try:
            code, _ = await execute.execute(client.executor, command, stdin=stdin, write=_write)
        except InvalidRequest as error:
            raise _not_run(command, error) from error
    return code


def _not_run(command: "Command", error: "InvalidRequest") -> Exception:
    """A command that could not be started, with the exit code that shells give it."""
    if error.code != "access.not_runnable":
        return error
    absent = os.strerror(errno.ENOENT) in error.message
    message = f"cannot run {command.argv[0]!r}: {error.message}"
    return CliError(message, code=error.code, field=error.field, exit_code=NO_COMMAND if absent else NOT_RUNNABLE)


def _write(channel: int, data: bytes) -> None:
    stream = sys.stdout if channel == STDOUT else sys.stderr
    stream.buffer.write(data)
    stream.buffer.flush()


async def _stdin() -> AsyncIterator[bytes]:
    """Standard input, whatever it is: files cannot be waited for and terminals block, so a thread reads it.

    It reads the next piece only when the last one was sent. It is a daemon: a read that never ends does not keep the
    command from ending.
    """
    import asyncio

    from penstock.sdk.execute import CHUNK_BYTES

    loop = asyncio.get_running_loop()
    wanted = threading.Semaphore(0)
    pieces: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)

    def read() -> None:
        piece = b"-"
        while piece:
            wanted.acquire()
            try:
                piece = os.read(0, CHUNK_BYTES)
            except OSError:
                piece = b""
            if loop.is_closed():
                return
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

    threading.Thread(target=read, name="stdin", daemon=True).start()
    while True:
        wanted.release()
        if not (piece := await pieces.get()):
            return
        yield piece

"""Code archives, unpacked in a process of its own (`node.unpacker`) with limits, that ends with what wants it.

Nothing in an archive is believed, and nothing of it is read in this process. `bad_code` is only what the reader found
in the archive: it is the same on every node. The limits of the process, its memory and the errors of the system depend
on the node, so they are `code_not_unpacked` or `disk_full`, and another node may do better.
"""

import asyncio
import errno
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import penstock
from penstock.node.errors import CODE_NOT_UNPACKED, DISK_FULL, Failed
from penstock.node.unpacker import BAD, FAILED
from penstock.wire import archives
from penstock.wire.tasks import BAD_CODE

_SAID_BYTES_MAX: Final = 4096
#: The unpacker sees our package and the standard library: nothing is searched for, so it starts at once.
_PROGRAM: Final = "import sys; sys.path.insert(0, sys.argv[1]); from penstock.node.unpacker import main; main()"
_PACKAGES: Final = str(Path(penstock.__file__).parent.parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much one archive may take."""

    files_max: int = archives.FILES_MAX
    bytes_max: int = archives.UNPACKED_BYTES_MAX
    cpu_s: int = 10
    wall_s: int = 15


LIMITS: Final = Limits()


async def unpack(archive: Path, target: Path, *, uid: int | None, limits: Limits = LIMITS) -> None:
    """Unpack into the new folder `target`, which becomes `uid`'s with all that is in it. Failed says why not; `target`
    is then for the caller to delete."""
    target.mkdir(mode=0o755)
    target.chmod(0o755)
    if uid is not None:
        os.chown(target, uid, uid)
    with archive.open("rb") as content:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _PROGRAM, _PACKAGES),
            *(str(each) for each in (-1 if uid is None else uid, limits.files_max, limits.bytes_max)),
            *(str(limits.cpu_s), str(limits.wall_s)),
            stdin=content,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            cwd=target,
            env={},
        )
    try:
        said = await _said(process, limits)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    _judge(process.returncode or 0, said, limits)


async def _said(process: asyncio.subprocess.Process, limits: Limits) -> str:
    assert process.stdout is not None
    try:
        # A moment more than it gives itself: from here on, the end is ours to bring.
        async with asyncio.timeout(limits.wall_s + 1):
            said = await process.stdout.read(_SAID_BYTES_MAX)
            await process.wait()
    except TimeoutError:
        raise _slow(limits) from None
    return said.decode(errors="replace")


def _judge(code: int, said: str, limits: Limits) -> None:
    if code == BAD:
        raise bad(said)
    if code == -signal.SIGXCPU:
        raise Failed(CODE_NOT_UNPACKED, f"unpacking the code took more than {limits.cpu_s} s of processor time")
    if code == -signal.SIGALRM:
        raise _slow(limits)
    if code == FAILED:
        raise _failed(int(said))
    if code:
        raise Failed(CODE_NOT_UNPACKED, f"the code cannot be unpacked: the unpacker ended with {code}")


def bad(detail: str) -> Failed:
    """The archive is of no use anywhere."""
    return Failed(BAD_CODE, f"the function's code archive cannot be used: {detail}")


def _slow(limits: Limits) -> Failed:
    return Failed(CODE_NOT_UNPACKED, f"the code was not unpacked within {limits.wall_s} s")


def _failed(number: int) -> Failed:
    full = number in (errno.ENOSPC, errno.EDQUOT)
    code = DISK_FULL if full else CODE_NOT_UNPACKED
    return Failed(code, f"the code cannot be unpacked on this node: {os.strerror(number)}")

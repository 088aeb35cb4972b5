"""The agent's end of a control socket, with an init on the other that a tenant has taken over."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from penstock.node.control import Control, Ending
from penstock.node.errors import Unlinked
from penstock.node.journal import UnitRecord
from penstock.node.unit import Unit
from penstock.wire.link import UnitState


class Taken:
    """An init that says what it likes."""

    def __init__(self) -> None:
        ours, self.socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.socket.setblocking(False)
        self.endings: list[Ending] = []
        unit = Unit(UnitRecord(unit_id="alc_x", state=UnitState.RUNNING, boot_id="", egress=["*"]))
        self.control = Control(
            ours,
            on_exit=self.endings.append,
            on_log=lambda stream, dropped, chunk: None,
            on_dial=unit.dialled,
            on_lost=lambda: None,
        )

    def say(self, *fields: bytes, descriptor: int | None = None) -> None:
        socket.send_fds(self.socket, [b"\0".join(fields)], [] if descriptor is None else [descriptor])

    async def asked(self) -> list[bytes]:
        """The next request."""
        packet = await asyncio.get_running_loop().sock_recv(self.socket, 1 << 16)
        return packet.split(b"\0")


@pytest.fixture
async def init() -> AsyncIterator[Taken]:
    taken = Taken()
    yield taken
    taken.control.close()
    taken.socket.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """Something that is no connection."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def copies(folder: Path) -> int:
    """How many descriptors of this process lead there."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found += entry.readlink() == folder
        except FileNotFoundError:
            continue
    return found


async def answered(init: Taken) -> None:
    """Everything that init said before has been read."""
    ping = asyncio.create_task(init.control.ping())
    _, request = await init.asked()
    init.say(b"ok", request, b"")
    await ping


async def test_what_is_no_connection_is_closed(init: Taken, file: int, tmp_path: Path) -> None:
    for _ in range(20):
        init.say(b"dial", b"", descriptor=file)
    await answered(init)
    assert copies(tmp_path) == 1
    connecting = asyncio.create_task(init.control.connect(80))
    _, request, _ = await init.asked()
    init.say(b"ok", request, b"", descriptor=file)
    with pytest.raises(Unlinked):
        await connecting
    assert copies(tmp_path) == 1


async def test_a_descriptor_that_nobody_asked_for_is_closed(init: Taken, file: int, tmp_path: Path) -> None:
    stopping = asyncio.create_task(init.control.stop())
    _, request = await init.asked()
    init.say(b"ok", request, b"", descriptor=file)
    await stopping
    connecting = asyncio.create_task(init.control.connect(80))
    _, request, _ = await init.asked()
    connecting.cancel()
    init.say(b"ok", request, b"", descriptor=file)
    with pytest.raises(asyncio.CancelledError):
        await connecting
    await answered(init)
    assert copies(tmp_path) == 1


@pytest.mark.parametrize("code", [b"-1", b"256", b"1" + b"0" * 30])
async def test_an_exit_code_that_no_process_has_is_not_believed(init: Taken, code: bytes) -> None:
    init.say(b"exit", b"main", code, b"0")
    init.say(b"exit", b"main", b"255", b"0")
    await answered(init)
    assert init.endings == [Ending(255, signalled=False)]

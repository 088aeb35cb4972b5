"""Heartbeats of event loops, in systemd's notify protocol: `WATCHDOG=1` to the socket in NOTIFY_SOCKET.

The same datagrams serve systemd (`WatchdogSec=`), our own supervisor and a process that forked others. They are sent by
the loop itself, so a loop that stands still is silent. Who sent one is said by the kernel, not by the sender.
"""

import asyncio
import os
import secrets
import socket
import struct
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Final

from prometheus_client import Gauge

#: Between two heartbeats, unless the listener wants them sooner.
EVERY_S: Final = 2.0
_SOCKET: Final = "NOTIFY_SOCKET"
_WITHIN: Final = "WATCHDOG_USEC"
_PID: Final = "WATCHDOG_PID"
_CREDENTIALS: Final = struct.Struct("3i")
_DATAGRAM_MAX: Final = 512
_lag = Gauge("penstock_loop_lag_seconds", "How late the event loop came to its last heartbeat.")


class Heart:
    """Sends the heartbeats of this process; to nobody where nobody asked for them."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Connected at once: later the process may be another user. No child of ours inherits the variables."""
        address, within, pid = (environ.pop(name, "") for name in (_SOCKET, _WITHIN, _PID))
        self._socket: socket.socket | None = None
        self._every_s = EVERY_S
        if not address or not within.isdigit() or (pid and pid != str(os.getpid())):
            return
        self._every_s = min(EVERY_S, int(within) / 1e6 / 4)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        with suppress(OSError):
            self._socket.connect("\0" + address[1:] if address.startswith("@") else address)

    async def beat(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                due = loop.time() + self._every_s
                self._send(b"WATCHDOG=1")
                await asyncio.sleep(self._every_s)
                _lag.set(max(0.0, loop.time() - due))
        finally:
            if self._socket is not None:
                self._socket.close()

    def _send(self, text: bytes) -> None:
        # A listener that is away or full is no reason to end.
        with suppress(OSError):
            if self._socket is not None:
                self._socket.send(text)


class Listener:
    """Hears the heartbeats of other processes on this machine."""

    def __init__(self) -> None:
        self.address = f"@penstock-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("\0" + self.address[1:])

    def environment(self, within_s: float) -> dict[str, str]:
        """Variables for a child that is missed after this time."""
        return {_SOCKET: self.address, _WITHIN: str(int(within_s * 1e6))}

    def listen(self, heard: Callable[[int], None]) -> None:
        """Call `heard(pid)` for each heartbeat from now on."""
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read, heard)

    def close(self) -> None:
        """No longer; also for a fork that must not listen."""
        with suppress(RuntimeError):
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()

    def _read(self, heard: Callable[[int], None]) -> None:
        with suppress(BlockingIOError):
            while True:
                data, ancillary, _, _ = self._socket.recvmsg(_DATAGRAM_MAX, socket.CMSG_SPACE(_CREDENTIALS.size))
                if b"WATCHDOG=1" in data.split(b"\n"):
                    for _, kind, value in ancillary:
                        if kind == socket.SCM_CREDENTIALS:
                            heard(_CREDENTIALS.unpack(value)[0])


class Silence:
    """How long nothing was heard, counted in the listener's own running time: after a machine slept, or the listener
    itself was stopped, everybody has the whole time again."""

    def __init__(self, tick_s: float) -> None:
        self.tick_s = tick_s
        self.seconds = 0.0

    def heard(self) -> None:
        """A sign of life came."""
        self.seconds = 0.0

    def passed(self, elapsed_s: float) -> float:
        """The next look; what is more than two of its periods did not pass for us."""
        self.seconds += min(elapsed_s, 2 * self.tick_s)
        return self.seconds

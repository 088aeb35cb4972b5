"""A connection between agent and sidecar: whole packets, some with a descriptor, over a path of any length.

A packet that cannot be read ends the connection; its sender comes back and says everything again.
"""

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from penstock.node.errors import Unlinked
from penstock.wire.sidecar import PACKET_BYTES_MAX
from penstock.wire.unreadable import UNREADABLE

_DESCRIPTORS_MAX: Final = 1
_WAITING_MAX: Final = 16384
_CREDENTIALS: Final = struct.Struct("3i")
_encoder: Final = msgspec.msgpack.Encoder()


def peer_uid(connection: socket.socket) -> int:
    """Whose process the other end is: for a listener, who it was when it began to listen."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)[1] & 0xFFFF_FFFF


@contextmanager
def address(path: Path) -> Iterator[str]:
    """The socket's path, always short enough for an address."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class Packets:
    """One end. `on_packet(data, descriptor)` owns the descriptor; `on_lost` is called once, also for our own close."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        on_packet: Callable[[bytes, int | None], None],
        on_lost: Callable[[], None],
    ) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._on_packet = on_packet
        self._on_lost = on_lost
        self._waiting: deque[tuple[bytes, int | None]] = deque()
        self._open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection.fileno(), self._readable)

    def send(self, packet: msgspec.Struct, descriptor: int | None = None) -> None:
        """Send in order, soon. The descriptor stays the caller's; our copy is closed when it has been sent."""
        if not self._open:
            return
        if len(self._waiting) >= _WAITING_MAX:
            self.close()
            return
        copy = None if descriptor is None else os.dup(descriptor)
        self._waiting.append((_encoder.encode(packet), copy))
        if len(self._waiting) == 1:
            self._writable()

    def close(self) -> None:
        """End the connection."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        for _, descriptor in self._waiting:
            if descriptor is not None:
                os.close(descriptor)
        self._waiting.clear()
        self._on_lost()

    def _writable(self) -> None:
        while self._waiting:
            data, descriptor = self._waiting[0]
            try:
                socket.send_fds(self._socket, [data], [] if descriptor is None else [descriptor])
            except BlockingIOError:
                self._loop.add_writer(self._socket.fileno(), self._writable)
                return
            except OSError:
                self.close()
                return
            self._waiting.popleft()
            if descriptor is not None:
                os.close(descriptor)
        self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        try:
            data, descriptors, flags, _ = socket.recv_fds(
                self._socket, PACKET_BYTES_MAX, _DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        if not data or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            for descriptor in descriptors:
                os.close(descriptor)
            self.close()
            return
        try:
            self._on_packet(data, descriptors[0] if descriptors else None)
        except (Unlinked, *UNREADABLE):
            self.close()

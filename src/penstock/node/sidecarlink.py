"""The agent's end of its connection to the sidecar. What the agent said is kept here until the unit has ended, and said
again whenever the sidecar comes back: the caller says each thing once and never waits.
"""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from penstock.kit.clock import backoff_s
from penstock.kit.telemetry import logger
from penstock.node.packets import Packets, address, peer_uid
from penstock.wire.sidecar import UNITS_MAX, Ended, ExitClass, Has, Keep, Kill, Reaches, Serve, SidecarPacket
from penstock.wire.tasks import Serving, WorkerKeys

_log = logger(__name__)
_decoder: Final = msgspec.msgpack.Decoder(SidecarPacket)
#: Ends that are said again after a reconnect; older ones are told by not being kept.
_ENDED_MAX: Final = 256
_AGAIN_CAP_S: Final = 2.0
_DETAIL_CHARACTERS_MAX: Final = 4096


class SidecarLink:
    """`serve` and `ended` for the agent; `run` keeps the connection. `uid` is the sidecar's, where it has its own;
    `on_kill(unit_id, reason)` ends a unit; `on_reach` is called when the sidecar says whether it reaches the queue."""

    def __init__(
        self,
        path: Path,
        *,
        uid: int | None,
        on_kill: Callable[[str, str], None],
        on_reach: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = path
        self._uids = {os.geteuid()} if uid is None else {uid}
        self._on_kill = on_kill
        self._on_reach = on_reach
        self._reaches_queue = False
        self._serves: dict[str, tuple[Serve, int]] = {}
        self._ended: deque[Ended] = deque(maxlen=_ENDED_MAX)
        self._packets: Packets | None = None

    @property
    def connected(self) -> bool:
        """Whether the sidecar is there."""
        return self._packets is not None

    @property
    def serves_functions(self) -> bool:
        """Whether the sidecar is there and reaches the queue."""
        return self.connected and self._reaches_queue

    def serve(
        self, unit_id: str, *, uid: int, serving: Serving, keys: WorkerKeys, memory_bytes: int, folder: int
    ) -> None:
        """A unit that serves. `folder` is a descriptor of the framework's folder; it is the link's from now on."""
        if unit_id in self._serves or len(self._serves) >= UNITS_MAX:
            os.close(folder)
            return
        packet = Serve(unit_id=unit_id, uid=uid, serving=serving, keys=keys, memory_bytes=memory_bytes)
        self._serves[unit_id] = (packet, folder)
        # It begins anew: said again after this, its earlier end would end it.
        self._ended = deque((ended for ended in self._ended if ended.unit_id != unit_id), maxlen=_ENDED_MAX)
        if self._packets is not None:
            self._packets.send(packet, folder)

    def ended(self, unit_id: str, *, exit_class: ExitClass, exit_code: int = 0, detail: str = "") -> None:
        """The unit is no more. Units that do not serve are ignored, so that every end may be said."""
        kept = self._serves.pop(unit_id, None)
        if kept is None:
            return
        os.close(kept[1])
        detail = detail[:_DETAIL_CHARACTERS_MAX]
        packet = Ended(unit_id=unit_id, exit_class=exit_class, exit_code=exit_code, detail=detail)
        if self._packets is not None:
            self._packets.send(packet)
        self._ended.append(packet)

    async def run(self) -> None:
        """Connect, and again whenever it is lost, for ever."""
        failures = 0
        while True:
            lost = asyncio.Event()
            try:
                self._packets = self._connect(lost)
            except OSError as error:
                _log.debug("sidecar_away", error=error.strerror)
                failures += 1
            else:
                failures = 0
                self._tell_everything(self._packets)
                try:
                    await lost.wait()
                finally:
                    self._packets.close()
                    self._packets = None
                    self._reaches_queue = False
                _log.warning("sidecar_lost")
            await asyncio.sleep(backoff_s(failures, base_s=0.02, cap_s=_AGAIN_CAP_S))

    def close(self) -> None:
        """Give the descriptors back; for the end of the agent. Units go on, and are served again after it."""
        for _, folder in self._serves.values():
            os.close(folder)
        self._serves.clear()

    def _connect(self, lost: asyncio.Event) -> Packets:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.setblocking(False)
            with address(self._path) as short:
                connection.connect(short)
            if (uid := peer_uid(connection)) not in self._uids:
                raise PermissionError(0, f"the sidecar's socket belongs to a process of uid {uid}")
        except BaseException:
            connection.close()
            raise
        return Packets(connection, on_packet=self._receive, on_lost=lost.set)

    def _tell_everything(self, packets: Packets) -> None:
        for serve, folder in self._serves.values():
            packets.send(serve, folder)
        for ended in self._ended:
            packets.send(ended)
        packets.send(Keep(unit_ids=list(self._serves)))

    def _receive(self, data: bytes, descriptor: int | None) -> None:
        if descriptor is not None:
            os.close(descriptor)
        packet = _decoder.decode(data)
        if isinstance(packet, Has):
            _log.info("sidecar_connected", units=len(packet.unit_ids))
        elif isinstance(packet, Reaches):
            self._reaches_queue = packet.queue
            self._on_reach()
        else:
            assert isinstance(packet, Kill)
            _log.warning("sidecar_asks_for_end", unit_id=packet.unit_id, reason=packet.reason)
            self._on_kill(packet.unit_id, packet.reason)

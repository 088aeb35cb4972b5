"""All workers of a node, as the agent tells them. The agent connects to our socket; while it is away, they go on."""

import asyncio
import os
import socket
from pathlib import Path
from typing import Final

import msgspec

from penstock.kit.errors import Conflict, Invalid
from penstock.kit.telemetry import logger
from penstock.node.errors import Unlinked
from penstock.node.packets import Packets, address, peer_uid
from penstock.node.sidecar.worker import Surroundings, Worker
from penstock.wire.sidecar import UNITS_MAX, AgentPacket, Ended, ExitClass, Has, Keep, Kill, Reaches, Serve
from penstock.wire.unreadable import UNREADABLE

_log = logger(__name__)
_decoder: Final = msgspec.msgpack.Decoder(AgentPacket)
_BACKLOG: Final = 8


def bind(path: Path) -> socket.socket:
    """The socket for the agent, bound and not yet listening: whoever listens is whom the agent sees."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with address(path) as short:
            if _answers(short):
                raise Conflict(f"another sidecar listens on {path}", field="sidecar.socket")
            path.unlink(missing_ok=True)
            listener.bind(short)
        path.chmod(0o600)
    except OSError as error:
        listener.close()
        raise Invalid(f"cannot listen on {path}: {error.strerror}", field="sidecar.socket") from error
    except Conflict:
        listener.close()
        raise
    return listener


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


class Roster:
    """Accepts the agent, of one of `uids`, and keeps a worker for each unit that it names."""

    def __init__(self, listener: socket.socket, uids: frozenset[int], around: Surroundings) -> None:
        self._listener = listener
        self._uids = uids
        self._around = around
        self._workers: dict[str, tuple[Worker, asyncio.Task[None]]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._kills: dict[str, str] = {}
        self._agent: Packets | None = None
        self._reaches = Reaches(queue=False)

    def __len__(self) -> int:
        """How many units are served."""
        return len(self._workers)

    def reaches(self, queue: bool) -> None:
        """Whether the node's workers can get at their work; for the agent."""
        self._reaches = Reaches(queue=queue)
        if self._agent is not None:
            self._agent.send(self._reaches)

    async def run(self) -> None:
        """Accept the agent, again and again; the newest connection is the one."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)
        try:
            while True:
                connection, _ = await loop.sock_accept(self._listener)
                self._accept(connection)
        finally:
            self._listener.close()
            await self._close()

    def _accept(self, connection: socket.socket) -> None:
        if (uid := peer_uid(connection)) not in self._uids:
            _log.warning("security_event", kind="stranger", uid=uid)
            connection.close()
            return
        if self._agent is not None:
            self._agent.close()
        agent = Packets(connection, on_packet=self._receive, on_lost=lambda: self._lost(agent))
        self._agent = agent
        agent.send(Has(unit_ids=list(self._workers)))
        agent.send(self._reaches)
        for unit_id, reason in self._kills.items():
            agent.send(Kill(unit_id=unit_id, reason=reason))
        _log.info("agent_connected", units=len(self._workers))

    def _lost(self, agent: Packets) -> None:
        if self._agent is agent:
            self._agent = None
            _log.info("agent_lost")

    def _receive(self, data: bytes, descriptor: int | None) -> None:
        try:
            packet = _decoder.decode(data)
        except UNREADABLE:
            _drop(descriptor)
            raise
        if isinstance(packet, Serve):
            self._serve(packet, descriptor)
            return
        _drop(descriptor)
        if isinstance(packet, Ended):
            self._end(packet)
        else:
            self._keep(packet)

    def _serve(self, packet: Serve, folder: int | None) -> None:
        if folder is None:
            raise Unlinked("no_folder", "a unit came without its folder")
        unit_id = packet.unit_id
        if (known := self._workers.get(unit_id)) is not None and known[0].keys != packet.keys:
            detail = "the worker has other keys now"
            self._end(Ended(unit_id=unit_id, exit_class=ExitClass.KILLED, detail=detail))
        if unit_id in self._workers or len(self._workers) >= UNITS_MAX:
            _drop(folder)
            return
        worker = Worker(packet, folder, self._around, lambda reason: self._kill(unit_id, reason))
        self._workers[unit_id] = worker, asyncio.get_running_loop().create_task(worker.run(), name=unit_id)

    def _end(self, packet: Ended) -> None:
        self._kills.pop(packet.unit_id, None)
        found = self._workers.pop(packet.unit_id, None)
        if found is None:
            return
        worker, task = found
        worker.end(packet)
        self._leaving.add(task)
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._leaving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("worker_failed", unit_id=task.get_name(), exc_info=error)

    def _keep(self, packet: Keep) -> None:
        for unit_id in set(self._workers).difference(packet.unit_ids):
            detail = "it ended while the agent was away"
            self._end(Ended(unit_id=unit_id, exit_class=ExitClass.KILLED, detail=detail))

    def _kill(self, unit_id: str, reason: str) -> None:
        """Said once, and again to an agent that comes back before the unit ended."""
        if unit_id not in self._workers or unit_id in self._kills:
            return
        self._kills[unit_id] = reason
        _log.warning("unit_must_end", unit_id=unit_id, reason=reason)
        if self._agent is not None:
            self._agent.send(Kill(unit_id=unit_id, reason=reason))

    async def _close(self) -> None:
        if self._agent is not None:
            self._agent.close()
        tasks = [task for _, task in self._workers.values()] + list(self._leaving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _drop(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)

"""Brings tasks to the links of a gateway: one statement leases for all nodes that may have work, however many.

Links are woken by hints, by agents that ask, and by the regular look around; while a statement is under way the next
batch gathers. Nothing is sent to a link beyond what its agent asked for. What a statement leased whose answer got lost
is given back before the link leases again.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import asyncpg

from penstock.fleet import tasks
from penstock.fleet.link import Link
from penstock.fleet.model import Config
from penstock.fleet.store import tasks as task_rows
from penstock.fleet.store.tasks import Leased, Want
from penstock.kit.db import Database
from penstock.kit.errors import Unavailable
from penstock.kit.telemetry import logger
from penstock.wire.link import Close, Tasks

#: Links in one statement.
_LINKS_MAX: Final = 256
_AGAIN_S: Final = 0.5
#: The database is away, or the agent does not read.
AWAY: Final = (Unavailable, asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError)

_log = logger(__name__)


class Courier:
    """Leases and sends, for one gateway."""

    def __init__(self, db: Database, config: Config) -> None:
        self._db = db
        self._config = config
        self._woken: dict[str, Link] = {}
        self._wake = asyncio.Event()
        #: Links whose last statement may or may not have leased something.
        self._doubtful: dict[str, Link] = {}
        self._sending: set[asyncio.Task[None]] = set()

    def wake(self, link: Link) -> None:
        """The link may have work."""
        self._woken[link.key.link_id] = link
        self._wake.set()

    def forget(self, link: Link) -> None:
        """The link ended."""
        self._woken.pop(link.key.link_id, None)
        self._doubtful.pop(link.key.link_id, None)

    async def deliver(self) -> None:
        """Wait until links are woken, then lease for them and send."""
        await self._wake.wait()
        batch = [self._woken.pop(link_id) for link_id in list(self._woken)[:_LINKS_MAX]]
        if not self._woken:
            self._wake.clear()
        wanting = [link for link in batch if link.free > 0]
        if not wanting:
            return
        try:
            leased = await self._lease(wanting)
        except AWAY as error:
            _log.warning("lease_deferred", links=len(wanting), error=repr(error))
            self._doubtful |= {link.key.link_id: link for link in wanting}
            for link in wanting:
                self.wake(link)
            await asyncio.sleep(_AGAIN_S)
            return
        for link in wanting:
            if found := leased.get(link.key.link_id):
                self._send(link, found)

    async def _lease(self, links: Sequence[Link]) -> dict[str, list[Leased]]:
        wants = [Want(link.key.node_id, link.key.link_id, min(link.free, tasks.BATCH_MAX)) for link in links]
        async with self._db.read() as conn:
            if doubtful := dict(self._doubtful):
                owed = [task_id for link in doubtful.values() for task_id in link.owed]
                await task_rows.give_back(conn, list(doubtful), except_ids=owed)
                for link_id in doubtful:
                    self._doubtful.pop(link_id, None)
            return await tasks.lease(conn, wants, self._config)

    def _send(self, link: Link, leased: list[Leased]) -> None:
        """In a task of its own: an agent that does not read holds up nobody else."""
        link.owed |= {task.id for task in leased}
        sending = asyncio.create_task(self._send_tasks(link, leased))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        if len(leased) == tasks.BATCH_MAX:
            self.wake(link)

    async def _send_tasks(self, link: Link, leased: list[Leased]) -> None:
        try:
            await link.socket.send(Tasks(tasks=[task.signed for task in leased]))
        except AWAY as error:
            _log.info("link_closed", reason="the agent does not read", error=repr(error))
            await link.socket.close(Close.RESTARTING, "try again")

"""Exchanges that run now. One whose key or session is revoked or whose allocation is gone ends within seconds.

Hints make it quick, a check every `RECHECK_S` makes it certain: together with what the authenticator keeps (2 s) an
exchange outlives its right by less than five seconds even when every hint is lost.
"""

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from penstock.access.model import Grant
from penstock.access.ports import Keys, Units
from penstock.access.service import ACTIVE
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Reader
from penstock.kit.telemetry import logger

RECHECK_S: Final = 2.0
#: A revocation is told to the authenticator and to us at once, in any order.
_HINT_SETTLES_S: Final = 0.1

_log = logger(__name__)


class Ending(StrEnum):
    """Why an exchange was ended from here."""

    REVOKED = "revoked"
    RELEASED = "released"


class Session:
    """One exchange and how to end it. Compared by identity."""

    __slots__ = ("end", "grant")

    def __init__(self, grant: Grant, end: Callable[[Ending], None]) -> None:
        self.grant = grant
        self.end = end


class Sessions:
    """All exchanges of this gateway."""

    def __init__(self, db: Database, keys: Keys, units: Units) -> None:
        self._db = db
        self._keys = keys
        self._units = units
        self._live: set[Session] = set()

    def __len__(self) -> int:
        return len(self._live)

    def begin(self, grant: Grant, end: Callable[[Ending], None]) -> Session:
        """Watch this exchange; `end` is called at most once per check until it is finished."""
        session = Session(grant, end)
        self._live.add(session)
        return session

    def finish(self, session: Session) -> None:
        """The exchange is over."""
        self._live.discard(session)

    async def recheck(self) -> None:
        """End what has lost its right: one look per caller and per allocation, however many exchanges they have."""
        if not self._live:
            return
        callers = {session.grant.caller for session in self._live}
        revoked = {caller for caller in callers if not await self._keys.still_valid(caller)}
        allocations = {(session.grant.caller.project_id, session.grant.allocation_id) for session in self._live}
        async with self._db.read() as conn:
            released = {pair for pair in allocations if not await self._active(conn, *pair)}
        for session in list(self._live):
            self._judge(session, revoked, released)

    async def recheck_allocation(self, allocation_id: str) -> None:
        """A hint: this allocation changed."""
        projects = {
            session.grant.caller.project_id for session in self._live if session.grant.allocation_id == allocation_id
        }
        if not projects:
            return
        async with self._db.read() as conn:
            released = {(it, allocation_id) for it in projects if not await self._active(conn, it, allocation_id)}
        for session in list(self._live):
            self._judge(session, set(), released)

    async def recheck_keys(self) -> None:
        """A hint: something was revoked."""
        await asyncio.sleep(_HINT_SETTLES_S)
        await self.recheck()

    async def _active(self, conn: Reader, project_id: str, allocation_id: str) -> bool:
        unit = await self._units.find(conn, project_id=project_id, allocation_id=allocation_id)
        return unit is not None and unit.state == ACTIVE

    def _judge(self, session: Session, revoked: set[Caller], released: set[tuple[str, str]]) -> None:
        grant = session.grant
        ending = None
        if grant.caller in revoked:
            ending = Ending.REVOKED
        elif (grant.caller.project_id, grant.allocation_id) in released:
            ending = Ending.RELEASED
        if ending is not None:
            self._live.discard(session)
            _log.info("session_ended", reason=ending, allocation_id=grant.allocation_id)
            session.end(ending)

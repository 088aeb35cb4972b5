"""Who may reach which unit. Answers are kept for at most `KEPT_S`, and forgotten when a hint says that they changed."""

import time
from collections.abc import Sequence
from typing import Final

from penstock.access.errors import NotActive
from penstock.access.model import Grant
from penstock.access.ports import Keys, UnitAddress, Units
from penstock.kit import audit
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.kit.errors import NotFound, brief, missing
from penstock.kit.ids import is_id

#: On top of what the authenticator keeps (2 s).
KEPT_S: Final = 1.0
_KEPT_MAX: Final = 10_000
_ARGV_AUDITED_MAX: Final = 1024
ACTION: Final = "allocations.exec"
ACTIVE: Final = "active"


class Access:
    """Authorises, and writes down who ran what."""

    def __init__(self, db: Database, keys: Keys, units: Units) -> None:
        self._db = db
        self._keys = keys
        self._units = units
        self._kept: dict[tuple[str | None, str | None, str], tuple[float, Grant]] = {}

    async def authorise(self, authorization: str | None, project: str | None, allocation_id: str) -> Grant:
        """What this credential may reach, or the error that says why not. Only a yes is kept."""
        asked = (authorization, project, allocation_id)
        kept = self._kept.get(asked)
        now = time.monotonic()
        if kept is not None and kept[0] > now:
            return kept[1]
        grant = await self._look(*asked)
        if len(self._kept) >= _KEPT_MAX:
            self._kept.clear()
        self._kept[asked] = (now + KEPT_S, grant)
        return grant

    async def _look(self, authorization: str | None, project: str | None, allocation_id: str) -> Grant:
        caller = await self._keys.authenticate(authorization, project)
        caller.require(ACTION)
        unit = await self._find(caller, allocation_id)
        if unit.state != ACTIVE or unit.node_id is None:
            raise NotActive(f"the allocation is {unit.state}, not active", retry_after_s=1)
        return Grant(caller=caller, allocation_id=allocation_id, node_id=unit.node_id, unit_id=unit.unit_id)

    async def _find(self, caller: Caller, allocation_id: str) -> UnitAddress:
        if not is_id("alc", allocation_id):
            needed = "an id (alc_…) is needed here, not a name; `penstock alloc list` shows it"
            raise NotFound(f"no allocation {brief(allocation_id)}: {needed}")
        async with self._db.read() as conn:
            unit = await self._units.find(conn, project_id=caller.project_id, allocation_id=allocation_id)
        if unit is None:
            raise missing("allocation", allocation_id)
        return unit

    def forget(self, allocation_id: str | None = None) -> None:
        """The allocation changed; without one, something was revoked."""
        for asked in [asked for asked in self._kept if allocation_id in (None, asked[2])]:
            del self._kept[asked]

    async def record_exec(self, grant: Grant, argv: Sequence[str]) -> None:
        """Before a command runs: who runs it where."""
        async with self._db.transaction() as tx:
            detail = {"argv": " ".join(argv)[:_ARGV_AUDITED_MAX], "node_id": grant.node_id}
            await audit.record(tx, grant.caller.actor, ACTION, grant.allocation_id, detail=detail)

"""Packages by name, resolved to a lock with hashes.

A resolution is a row; a node does the work (`flows/resolving.py`). The same text gets the same lock again until an
upgrade is asked for, so that a deploy without a change changes nothing.
"""

from dataclasses import dataclass
from typing import Final

from penstock.compute.errors import BadRequirements, TooManyResolutions
from penstock.compute.model import Resolution
from penstock.compute.service import validate
from penstock.compute.store import resolutions
from penstock.kit import audit
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Reader, Tx
from penstock.kit.errors import Invalid, missing
from penstock.kit.ids import new_id
from penstock.kit.telemetry import correlation_id
from penstock.wire import requirements, subjects
from penstock.wire.rest import ResolutionCreate

#: Under way at once in one project.
OPEN_MAX: Final = 4
#: Of one project, that succeeded and that failed. A text whose resolution is forgotten is resolved anew.
KEPT_MAX: Final = 200
_RETRY_S: Final = 5
_FORGOTTEN_S: Final = 24 * 3600.0
_BATCH: Final = 200


@dataclass(frozen=True, slots=True)
class Wanted:
    """Base and requirements, in their normal form."""

    base: str
    requirements: str


def check(caller: Caller, body: ResolutionCreate) -> Wanted:
    """The request, if the caller may make it and it names packages only. Before any transaction."""
    caller.require("runtimes.write")
    try:
        validate.image(body.base)
    except Invalid as error:
        raise type(error)(error.detail.replace("image", "base", 1), field="base") from error
    try:
        return Wanted(body.base, requirements.normal(body.requirements))
    except requirements.BadRequirements as error:
        raise BadRequirements(f"requirements: {error}", field="requirements") from error


async def request(tx: Tx, caller: Caller, wanted: Wanted, *, upgrade: bool) -> Resolution:
    """The resolution of this text: the one under way, the one before, or a new one."""
    await resolutions.lock_project(tx, caller.project_id)
    found = await resolutions.latest(tx, caller.project_id, wanted.base, wanted.requirements, only_open=upgrade)
    if found is not None:
        return found
    if await resolutions.count_open(tx, caller.project_id) >= OPEN_MAX:
        raise TooManyResolutions(
            f"the project has {OPEN_MAX} resolutions under way, which is the max; try again", retry_after_s=_RETRY_S
        )
    await resolutions.keep_newest(tx, caller.project_id, limit=KEPT_MAX)
    made = await resolutions.insert(
        tx,
        new_id("rsl"),
        caller.project_id,
        base=wanted.base,
        requirements=wanted.requirements,
        correlation_id=correlation_id(),
        created_by=caller.principal_id,
    )
    await audit.record(tx, caller.actor, "runtimes.resolve", made.id, detail={"base": wanted.base})
    tx.hint(subjects.RESOLUTIONS)
    return made


async def get(conn: Reader, caller: Caller, resolution_id: str) -> Resolution:
    """One of the caller's project."""
    caller.require("runtimes.read")
    found = await resolutions.find(conn, caller.project_id, resolution_id)
    if found is None:
        raise missing("resolution", resolution_id)
    return found


async def take_running(tx: Tx, *, limit: int) -> list[Resolution]:
    """Those that nodes were asked, locked until the transaction ends."""
    return await resolutions.take_running(tx, limit=limit)


async def take_queued(tx: Tx, *, limit: int) -> list[Resolution]:
    """Those that wait for a node, locked until the transaction ends; projects take turns."""
    return await resolutions.take_queued(tx, limit=limit)


async def loads(conn: Reader) -> dict[str, int]:
    """How many are asked of each node."""
    return await resolutions.loads(conn)


async def is_older(conn: Reader, one: Resolution, seconds: float) -> bool:
    """Whether it was asked for longer ago."""
    return await resolutions.is_older(conn, one.id, seconds)


async def run(tx: Tx, one: Resolution, *, node_id: str, task_id: str) -> None:
    """A node has been asked."""
    await resolutions.run(tx, one.id, node_id=node_id, task_id=task_id)


async def queue_again(tx: Tx, one: Resolution, *, code: str, error: str) -> None:
    """The node could not do it, for this reason; another may."""
    await resolutions.queue_again(tx, one.id, code=code, error=error)


async def succeed(tx: Tx, one: Resolution, *, lock: str, python: str) -> None:
    """It has its lock."""
    await resolutions.succeed(tx, one.id, lock=lock, python=python)


async def fail(tx: Tx, one: Resolution, *, code: str, error: str) -> None:
    """There will be no lock."""
    await resolutions.fail(tx, one.id, code=code, error=error)


async def sweep(db: Database) -> None:
    """Forget what failed, and what was resolved anew since."""
    async with db.transaction() as tx:
        await resolutions.sweep(tx, older_than_s=_FORGOTTEN_S, limit=_BATCH)

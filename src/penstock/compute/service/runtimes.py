"""Environments of a project: a base image with the packages of a lock, under a name.

A name may be changed; allocations hold on to the digest, and so to the lock that they were made with. It is deleted
only while nothing refers to it, as functions make their workers by the name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.compute.errors import BadLock, RuntimeInUse, RuntimeNamedByDigest, TooManyRuntimes, UnknownRuntime
from penstock.compute.model import Runtime
from penstock.compute.ports import Users
from penstock.compute.service import validate
from penstock.compute.store import runtimes
from penstock.kit import audit, parsing
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Reader, Tx
from penstock.kit.errors import Invalid, missing
from penstock.wire import locks
from penstock.wire.rest import AllocationCreate, RuntimePut
from penstock.wire.tasks import RuntimeLock

#: Names in one project.
RUNTIMES_MAX: Final = 200
#: Names that end in so much of their digest never mean another lock.
DIGEST_SHOWN: Final = 12
_DEFAULT_IMAGE: Final = "python:3"
_UNUSED_S: Final = 24 * 3600.0
_BATCH: Final = 200
_USERS_SHOWN: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """An environment's base image and its lock in the normal form."""

    base: str
    lock: str


@dataclass(frozen=True, slots=True)
class Chosen:
    """What an allocation runs on. `runtime` is a digest, empty for the image's own environment."""

    image: str
    runtime: str


async def check(caller: Caller, body: RuntimePut) -> Recipe:
    """What this describes, if it may be asked for. Reads the lock: before any transaction."""
    caller.require("runtimes.write")
    _base(body.base)
    try:
        lock = await parsing.parse(len(body.lock), locks.normal, body.lock)
    except locks.BadLock as error:
        raise BadLock(f"lock: {error}", field="lock") from error
    return Recipe(base=body.base, lock=lock)


async def put(tx: Tx, caller: Caller, name: str, recipe: Recipe) -> Runtime:
    """Define or change an environment."""
    caller.require("runtimes.write")
    if await runtimes.count_others(tx, caller.project_id, name) >= RUNTIMES_MAX:
        raise TooManyRuntimes(f"the project has {RUNTIMES_MAX} runtimes, which is the max; delete one", field="name")
    digest = locks.digest(recipe.base, recipe.lock)
    before = await runtimes.take(tx, caller.project_id, name)
    if before not in (None, digest) and name.endswith(f"-{before[:DIGEST_SHOWN]}"):
        raise RuntimeNamedByDigest(f"runtime {name} is named by its digest and stays what it is; choose another name")
    await runtimes.put(tx, caller.project_id, name, digest=digest, base=recipe.base, lock=recipe.lock)
    await audit.record(tx, caller.actor, "runtimes.write", name, detail={"digest": digest, "base": recipe.base})
    return await _found(tx, caller, name)


async def get(conn: Reader, caller: Caller, name: str) -> Runtime:
    """One environment of the caller's project."""
    caller.require("runtimes.read")
    return await _found(conn, caller, name)


async def page(conn: Reader, caller: Caller, *, after: str, limit: int) -> Sequence[Runtime]:
    """The environments of the caller's project, by name."""
    caller.require("runtimes.read")
    return await runtimes.page(conn, caller.project_id, after=after, limit=limit)


async def delete(tx: Tx, caller: Caller, name: str, users: Users) -> None:
    """Forget an environment that no living allocation uses and no version of a function names."""
    caller.require("runtimes.write")
    digest = await runtimes.take(tx, caller.project_id, name)
    if digest is None:
        raise missing("runtime", name)
    if held := await runtimes.users(tx, caller.project_id, digest):
        raise RuntimeInUse(f"runtime {name} is used by allocations that have not ended, such as {', '.join(held)}")
    # A deploy that names it holds the name until it is committed, so it is seen here or finds no such runtime.
    if named := await users.of_runtime(tx, caller.project_id, name, limit=_USERS_SHOWN):
        raise RuntimeInUse(f"runtime {name} is named by a current or kept version of {', '.join(named)}")
    await runtimes.delete(tx, caller.project_id, name)
    await audit.record(tx, caller.actor, "runtimes.delete", name, detail={"digest": digest})


async def choose(tx: Tx, caller: Caller, body: AllocationCreate) -> Chosen:
    """What the request is to run on: the environment that it names, or the image."""
    if body.runtime is None:
        return Chosen(body.image, "")
    found = await runtimes.hold(tx, caller.project_id, body.runtime)
    if found is None:
        raise UnknownRuntime(f"there is no runtime {body.runtime}", field="runtime")
    if body.image not in (_DEFAULT_IMAGE, found.base):
        raise Invalid(f"image must be left out or be {found.base}, the base of runtime {found.name}", field="image")
    return Chosen(found.base, found.digest)


async def lock_of(tx: Tx, digest: str) -> RuntimeLock | None:
    """What a node needs to build the environment."""
    found = await runtimes.lock_of(tx, digest)
    return RuntimeLock(digest=digest, base=found[0], lock=locks.pack(found[1])) if found else None


async def sweep(db: Database) -> None:
    """Forget locks that nothing refers to any more."""
    async with db.transaction() as tx:
        await runtimes.sweep(tx, unused_s=_UNUSED_S, limit=_BATCH)


async def _found(conn: Reader, caller: Caller, name: str) -> Runtime:
    found = await runtimes.find(conn, caller.project_id, name)
    if found is None:
        raise missing("runtime", name)
    return found


def _base(image: str) -> None:
    try:
        validate.image(image)
    except Invalid as error:
        raise type(error)(error.detail.replace("image", "base", 1), field="base") from error

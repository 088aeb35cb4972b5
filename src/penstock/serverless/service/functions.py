"""Deploy, roll back, delete and show functions.

Deploying what is there already changes nothing. Workers follow by themselves: the activator is hinted, and compares
what runs with what should.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.kit import audit, outbox
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import Invalid
from penstock.kit.ids import new_id
from penstock.kit.outbox import Event
from penstock.kit.outward import Outward, Undelivered
from penstock.serverless import definitions
from penstock.serverless.definitions import FUNCTIONS_MAX, Deployed, Version
from penstock.serverless.errors import NoFunction, NoVersion, TooManyFunctions
from penstock.serverless.model import Worker
from penstock.serverless.ports import Templates
from penstock.serverless.service import schedules, validate
from penstock.serverless.store import functions
from penstock.wire import subjects
from penstock.wire.rest import FunctionPut


@dataclass(frozen=True, slots=True)
class Functions:
    """The use cases of people who write functions."""

    templates: Templates
    outward: Outward

    async def check(self, caller: Caller, name: str, body: FunctionPut) -> str:
        """The name as it is kept, if this may be asked for. Looks names and objects up: before any transaction."""
        caller.require("functions.write")
        kept = validate.name(caller.project_id, name)
        validate.definition(body)
        if body.webhook is not None:
            await check_webhook(self.outward, body.webhook)
        if body.code is not None:
            await self.templates.check_code(caller.project_id, body.code)
        return kept

    async def put(self, tx: Tx, caller: Caller, name: str, body: FunctionPut) -> Deployed:
        """Deploy what was checked: a new version, unless it is what the current one is."""
        caller.require("functions.write")
        digest = definitions.digest(body)
        await functions.lock_project(tx, caller.project_id)
        before = await functions.lock(tx, caller.project_id, name)
        if before is not None and before[2] == digest:
            return await _found(tx, caller, name)
        await self.templates.check(tx, caller, body)
        function_id = before[0] if before else await _make(tx, caller, name)
        number = await functions.next_number(tx, function_id)
        await functions.add_version(tx, function_id, number, body, digest=digest, created_by=caller.principal_id)
        made = await _switch(tx, caller, function_id, name, number, body)
        await _tell(tx, caller, made, "functions.deploy", "serverless.function_deployed")
        return made

    async def rollback(self, tx: Tx, caller: Caller, name: str, version: int | None) -> Deployed:
        """Make an earlier version current again; without a number, the one before."""
        caller.require("functions.write")
        before = await functions.lock(tx, caller.project_id, name)
        if before is None:
            raise NoFunction.named(caller.project_id, name)
        function_id, current, _ = before
        number = version if version is not None else await functions.version_before(tx, function_id, current)
        definition = None if number is None else await functions.version(tx, function_id, number)
        if number is None or definition is None:
            raise NoVersion(f"there is no version {number}" if number else f"there is no version before {current}")
        if number == current:
            return await _found(tx, caller, name)
        await self.templates.check(tx, caller, definition)
        made = await _switch(tx, caller, function_id, name, number, definition)
        await _tell(tx, caller, made, "functions.rollback", "serverless.function_rolled_back")
        return made


async def check_webhook(outward: Outward, url: str) -> None:
    """Pass if it can be told there."""
    try:
        await outward.check(url)
    except Undelivered as error:
        raise Invalid(f"webhook: {error.why}", field="webhook") from error


async def delete(tx: Tx, caller: Caller, name: str) -> str:
    """It takes nothing more, and its name is free. The id, for whoever ends what is open."""
    caller.require("functions.write")
    before = await functions.lock(tx, caller.project_id, name)
    if before is None:
        raise NoFunction.named(caller.project_id, name)
    last = await _found(tx, caller, name)
    await functions.mark_deleted(tx, last.id)
    await _tell(tx, caller, last, "functions.delete", "serverless.function_deleted", version=last.row_version + 1)
    return last.id


async def get(conn: Reader, caller: Caller, name: str) -> Deployed:
    """One function."""
    caller.require("functions.read")
    return await _found(conn, caller, name)


async def page(conn: Reader, caller: Caller, *, after: str, limit: int) -> Sequence[Deployed]:
    """The project's functions by name."""
    caller.require("functions.read")
    return await functions.page(conn, caller.project_id, after=after, limit=limit)


async def versions(conn: Reader, caller: Caller, name: str, *, before: int | None, limit: int) -> Sequence[Version]:
    """Versions, newest first."""
    found = await get(conn, caller, name)
    return await functions.versions(conn, found.id, before=before, limit=limit)


async def workers(conn: Reader, caller: Caller, name: str, *, after: str, limit: int) -> Sequence[Worker]:
    """Workers that are not gone."""
    found = await get(conn, caller, name)
    return await functions.workers(conn, found.id, after=after, limit=limit)


async def _found(conn: Reader, caller: Caller, name: str) -> Deployed:
    # What cannot be a name is nobody's: names are compared in small letters.
    found = await functions.find(conn, caller.project_id, name.lower())
    if found is None:
        raise NoFunction.named(caller.project_id, name)
    return found


async def _make(tx: Tx, caller: Caller, name: str) -> str:
    if await functions.count(tx, caller.project_id) >= FUNCTIONS_MAX:
        raise TooManyFunctions(f"a project has at most {FUNCTIONS_MAX} functions")
    function_id = new_id("fun")
    await functions.insert(
        tx,
        {
            "id": function_id,
            "project_id": caller.project_id,
            "organisation_id": caller.organisation_id,
            "name": name,
            "created_by": caller.principal_id,
            "created_kind": caller.principal_kind,
            "key_id": caller.key_id,
        },
    )
    return function_id


async def _switch(
    tx: Tx, caller: Caller, function_id: str, name: str, number: int, definition: FunctionPut
) -> Deployed:
    await functions.switch(
        tx,
        function_id,
        number,
        created_by=caller.principal_id,
        created_kind=caller.principal_kind,
        key_id=caller.key_id,
    )
    await schedules.plan(tx, function_id, definition.schedule)
    return await _found(tx, caller, name)


async def _tell(
    tx: Tx, caller: Caller, function: Deployed, action: str, fact: str, *, version: int | None = None
) -> None:
    detail = {"name": function.name, "version": function.current_version}
    await audit.record(tx, caller.actor, action, function.id, detail=detail)
    event = Event(
        type=fact,
        aggregate_id=function.id,
        version=version or function.row_version,
        organisation_id=function.organisation_id,
        project_id=function.project_id,
        payload=function.fact,
    )
    await outbox.append(tx, event)
    tx.hint(subjects.FUNCTIONS, function.id.encode())

"""Projects: create, rename, archive."""

from collections.abc import Sequence

from penstock.identity import store
from penstock.identity.errors import ProjectOccupied
from penstock.identity.model import DEFAULT_PROJECT, PrincipalKind, Project, Role
from penstock.identity.ports import Occupancy
from penstock.identity.service import policy
from penstock.identity.store import logins
from penstock.kit import audit, outbox
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import Conflict, Denied, missing
from penstock.kit.ids import check_id, new_id
from penstock.kit.outbox import Event
from penstock.wire import subjects


async def create(tx: Tx, caller: Caller, *, name: str, organisation_id: str | None) -> Project:
    """A new project, owned by the caller. Operators may name another organisation than their own."""
    caller.require("projects.create")
    target = await _organisation(tx, caller, organisation_id)
    made = await store.insert_project(tx, project_id=new_id("prj"), organisation_id=target, name=name)
    await store.put_member(tx, made.id, caller.principal_id, Role.OWNER)
    await _record(tx, caller, made, "projects.create", "identity.project_created")
    return made


async def _organisation(tx: Tx, caller: Caller, asked: str | None) -> str:
    if asked is None or asked == caller.organisation_id:
        return caller.organisation_id
    if not caller.operator:
        raise Denied("organisation_id: only operators may name another organisation", field="organisation_id")
    check_id("org", asked, field="organisation_id")
    if not await store.organisation_exists(tx, asked):
        raise missing("organisation", asked, field="organisation_id")
    return asked


async def show(conn: Reader, caller: Caller, project_id: str) -> Project:
    """One project."""
    caller.require("projects.read")
    policy.require_project(caller, project_id)
    return _found(await store.find_project(conn, project_id), project_id)


async def list_projects(conn: Reader, caller: Caller, *, after: str, limit: int) -> list[Project]:
    """Those that this caller's key or login can act in."""
    caller.require("projects.read")
    if caller.login is not None and not caller.operator:
        return await logins.granted_projects(
            conn,
            principal_id=caller.principal_id,
            provider=caller.login.provider,
            groups=caller.login.groups,
            after=after,
            limit=limit,
        )
    roams = caller.role == Role.OWNER and caller.principal_kind == PrincipalKind.USER
    own = not caller.operator and not roams
    return await store.list_projects(
        conn,
        only=caller.project_id if own else None,
        organisation_id=None if caller.operator else caller.organisation_id,
        member_id=None if caller.operator else caller.principal_id,
        after=after,
        limit=limit,
    )


async def rename(tx: Tx, caller: Caller, project_id: str, name: str) -> Project:
    """Another name."""
    caller.require("projects.update")
    policy.require_project(caller, project_id)
    changed = _found(await store.change_project(tx, project_id, name=name), project_id)
    await _record(tx, caller, changed, "projects.update", "identity.project_updated")
    return changed


async def archive(tx: Tx, caller: Caller, occupancies: Sequence[Occupancy], project_id: str) -> None:
    """Close the project for good: its keys stop working, its rows stay. Refused while anything lives in it."""
    caller.require("projects.delete")
    policy.require_project(caller, project_id)
    if project_id == DEFAULT_PROJECT:
        raise Conflict("the default project cannot be deleted")
    changed = _found(await store.change_project(tx, project_id, archive=True), project_id)
    for each in occupancies:
        if what := await each.occupied(tx, project_id):
            raise ProjectOccupied(f"the project still has {what}: release allocations and delete functions first")
    await _record(tx, caller, changed, "projects.delete", "identity.project_deleted")
    tx.hint(subjects.REVOKED)


def _found(project: Project | None, project_id: str) -> Project:
    if project is None:
        raise missing("project", project_id)
    return project


async def _record(tx: Tx, caller: Caller, project: Project, action: str, event_type: str) -> None:
    owner = {"organisation_id": project.organisation_id, "project_id": project.id}
    await audit.record(tx, caller.actor, action, project.id, detail={"name": project.name}, **owner)
    await outbox.append(
        tx,
        Event(
            type=event_type,
            aggregate_id=project.id,
            version=project.version,
            payload={"project_id": project.id, "name": project.name},
            **owner,
        ),
    )

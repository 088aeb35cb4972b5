"""Members of a project and its service accounts. A change of members counts as a change of the project."""

from penstock.identity import store
from penstock.identity.errors import LastOwner
from penstock.identity.model import Member, PrincipalKind, Project, Role, ServiceAccount
from penstock.identity.service import policy
from penstock.kit import audit, outbox
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import missing
from penstock.kit.ids import new_id
from penstock.kit.outbox import Event
from penstock.wire import subjects


async def list_members(conn: Reader, caller: Caller, project_id: str, *, after: str, limit: int) -> list[Member]:
    """Who is in the project."""
    caller.require("members.read")
    policy.require_project(caller, project_id)
    if await store.find_project(conn, project_id) is None:
        raise missing("project", project_id)
    return await store.list_members(conn, project_id, after=after, limit=limit)


async def put(tx: Tx, caller: Caller, project_id: str, principal_id: str, role: Role) -> Member:
    """Give or change a role, within the caller's own. People from outside the organisation are added by operators."""
    caller.require("members.write")
    policy.require_project(caller, project_id)
    policy.require_within(caller, role)
    project = await _lock(tx, project_id)
    before = await store.find_member(tx, project_id, principal_id)
    if before is None:
        organisation_id = None if caller.operator else project.organisation_id
        if not await store.user_is_known(tx, principal_id, organisation_id=organisation_id):
            raise missing("user", principal_id)
    else:
        policy.require_within(caller, before.role)
        await _keep_an_owner(tx, project_id, before, role)
    await store.put_member(tx, project_id, principal_id, role)
    await _record(tx, caller, project, "identity.member_changed", principal_id, role)
    after = await store.find_member(tx, project_id, principal_id)
    assert after is not None
    return after


async def remove(tx: Tx, caller: Caller, project_id: str, principal_id: str) -> None:
    """End a membership. A project keeps at least one owner."""
    caller.require("members.write")
    policy.require_project(caller, project_id)
    project = await _lock(tx, project_id)
    member = await store.find_member(tx, project_id, principal_id)
    if member is None:
        raise missing("member", principal_id)
    policy.require_within(caller, member.role)
    await _keep_an_owner(tx, project_id, member, None)
    await store.delete_member(tx, project_id, principal_id)
    await _record(tx, caller, project, "identity.member_removed", principal_id, None)


async def create_service_account(tx: Tx, caller: Caller, *, name: str, role: Role) -> ServiceAccount:
    """A principal for programs in the current project."""
    caller.require("service_accounts.write")
    policy.require_within(caller, role)
    project = await _lock(tx, caller.project_id)
    account_id = new_id("sva")
    created_at = await store.insert_principal(
        tx, principal_id=account_id, kind=PrincipalKind.SERVICE_ACCOUNT, display_name=name
    )
    await store.insert_service_account(tx, account_id=account_id, project_id=project.id)
    await store.put_member(tx, project.id, account_id, role)
    await _record(tx, caller, project, "identity.service_account_created", account_id, role)
    return ServiceAccount(id=account_id, project_id=project.id, name=name, role=role, created_at=created_at)


async def list_service_accounts(conn: Reader, caller: Caller, *, after: str, limit: int) -> list[ServiceAccount]:
    """Those of the current project."""
    caller.require("service_accounts.read")
    return await store.list_service_accounts(conn, caller.project_id, after=after, limit=limit)


async def show_service_account(conn: Reader, caller: Caller, account_id: str) -> ServiceAccount:
    """One of the current project."""
    caller.require("service_accounts.read")
    return await _account(conn, caller, account_id)


async def delete_service_account(tx: Tx, caller: Caller, account_id: str) -> None:
    """Its membership and all its keys end with it."""
    caller.require("service_accounts.write")
    project = await _lock(tx, caller.project_id)
    account = await _account(tx, caller, account_id)
    policy.require_within(caller, account.role)
    await store.disable_principal(tx, account_id)
    await store.delete_member(tx, project.id, account_id)
    await store.revoke_keys_of(tx, account_id)
    await _record(tx, caller, project, "identity.service_account_deleted", account_id, None)


async def _account(conn: Reader, caller: Caller, account_id: str) -> ServiceAccount:
    account = await store.find_service_account(conn, caller.project_id, account_id)
    if account is None:
        raise missing("service account", account_id)
    return account


async def _lock(tx: Tx, project_id: str) -> Project:
    """Count the change first: the project's row then orders all changes of its members."""
    project = await store.change_project(tx, project_id)
    if project is None:
        raise missing("project", project_id)
    return project


async def _keep_an_owner(tx: Tx, project_id: str, before: Member, role: Role | None) -> None:
    if before.role is Role.OWNER and role is not Role.OWNER and await store.count_owners(tx, project_id) == 1:
        raise LastOwner("a project keeps at least one owner; make someone else an owner first")


async def _record(
    tx: Tx, caller: Caller, project: Project, event_type: str, principal_id: str, role: Role | None
) -> None:
    owner = {"organisation_id": project.organisation_id, "project_id": project.id}
    await audit.record(tx, caller.actor, event_type, principal_id, detail={"role": role}, **owner)
    await outbox.append(
        tx,
        Event(
            type=event_type,
            aggregate_id=project.id,
            version=project.version,
            payload={"project_id": project.id, "principal_id": principal_id, "role": role},
            **owner,
        ),
    )
    tx.hint(subjects.REVOKED)

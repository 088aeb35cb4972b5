"""REST of identity: decode, call the use case in one transaction, encode."""

from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Response, Router, delete, get, patch, post, put
from litestar.handlers import HTTPRouteHandler

from penstock.identity.errors import SecretShownBefore
from penstock.identity.ports import Occupancy
from penstock.identity.schemas import after, encode, page_of, shown
from penstock.identity.service import keys, members, organisations, policy, projects
from penstock.kit import http, idempotency, sealing
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Tx
from penstock.kit.idempotency import Once
from penstock.kit.ids import is_id
from penstock.kit.paging import PageQuery
from penstock.wire import rest


def router(db: Database, occupancies: Sequence[Occupancy], *, gateway_url: str) -> Router:
    """All routes of identity."""
    return Router(
        path="/",
        tags=["identity"],
        route_handlers=[
            _whoami(gateway_url),
            *_people(db),
            *_projects(db, occupancies),
            *_members(db),
            *_service_accounts(db),
            *_keys(db),
        ],
    )


def _principal(text: str) -> str:
    return text if is_id("sva", text) else http.path_id("usr", text)


def _whoami(gateway_url: str) -> HTTPRouteHandler:
    @get("/whoami", operation_id="whoami")
    async def whoami(caller: Caller) -> rest.Whoami:
        """The caller as the server sees it, and where units are reached."""
        return rest.Whoami(
            principal_id=caller.principal_id,
            principal_kind=caller.principal_kind,
            display_name=caller.display_name,
            organisation_id=caller.organisation_id,
            project_id=caller.project_id,
            role=caller.role,
            operator=caller.operator,
            key_id=caller.key_id,
            session_id=caller.login.id if caller.login and is_id("ses", caller.login.id) else None,
            gateway_url=gateway_url,
        )

    return whoami


def _people(db: Database) -> list[Any]:
    @get("/organisations", operation_id="listOrganisations")
    async def list_organisations(caller: Caller, page: PageQuery) -> rest.Page[rest.Organisation]:
        """Organisations that the caller can see."""
        async with db.read() as conn:
            found = await organisations.list_organisations(conn, caller, after=after(page), limit=page.limit + 1)
        return page_of(rest.Organisation, found, page)

    @post("/organisations", operation_id="createOrganisation", opt={"action": "organisations.write"})
    async def create_organisation(
        caller: Caller, once: Once | None, data: rest.OrganisationCreate
    ) -> Response[rest.Organisation]:
        """A new organisation; operators only."""

        async def effect(tx: Tx) -> bytes:
            return encode(rest.Organisation, await organisations.create_organisation(tx, caller, data.name))

        return http.created(await idempotency.run(db, once, effect))

    @get("/users", operation_id="listUsers")
    async def list_users(caller: Caller, page: PageQuery) -> rest.Page[rest.User]:
        """People in the caller's organisation; all for operators."""
        async with db.read() as conn:
            found = await organisations.list_users(conn, caller, after=after(page), limit=page.limit + 1)
        return page_of(rest.User, found, page)

    @post("/users", operation_id="createUser", opt={"action": "users.write"})
    async def create_user(caller: Caller, once: Once | None, data: rest.UserCreate) -> Response[rest.User]:
        """A new person; operators only."""

        async def effect(tx: Tx) -> bytes:
            made = await organisations.create_user(
                tx, caller, issuer=data.issuer, subject=data.subject, display_name=data.display_name
            )
            return encode(rest.User, made)

        return http.created(await idempotency.run(db, once, effect))

    @post("/users/{user_id:str}/disable", operation_id="disableUser", status_code=200)
    async def disable_user(caller: Caller, user_id: str) -> rest.User:
        """Shut a person out: no key, session or token of theirs works any more; operators only."""
        async with db.transaction() as tx:
            changed = await organisations.set_user_disabled(tx, caller, http.path_id("usr", user_id), disabled=True)
        return shown(rest.User, changed)

    @post("/users/{user_id:str}/enable", operation_id="enableUser", status_code=200)
    async def enable_user(caller: Caller, user_id: str) -> rest.User:
        """Let a person in again; operators only."""
        async with db.transaction() as tx:
            changed = await organisations.set_user_disabled(tx, caller, http.path_id("usr", user_id), disabled=False)
        return shown(rest.User, changed)

    return [list_organisations, create_organisation, list_users, create_user, disable_user, enable_user]


def _projects(db: Database, occupancies: Sequence[Occupancy]) -> list[Any]:
    @get("/projects", operation_id="listProjects")
    async def list_projects(caller: Caller, page: PageQuery) -> rest.Page[rest.Project]:
        """Projects that the caller can act in."""
        async with db.read() as conn:
            found = await projects.list_projects(conn, caller, after=after(page), limit=page.limit + 1)
        return page_of(rest.Project, found, page)

    @post("/projects", operation_id="createProject", opt={"action": "projects.create"})
    async def create_project(caller: Caller, once: Once | None, data: rest.ProjectCreate) -> Response[rest.Project]:
        """A new project, owned by the caller."""

        async def effect(tx: Tx) -> bytes:
            made = await projects.create(tx, caller, name=data.name, organisation_id=data.organisation_id)
            return encode(rest.Project, made)

        return http.created(await idempotency.run(db, once, effect))

    @get("/projects/{project_id:str}", operation_id="getProject")
    async def get_project(caller: Caller, project_id: str) -> rest.Project:
        """One project."""
        async with db.read() as conn:
            return shown(rest.Project, await projects.show(conn, caller, http.path_id("prj", project_id)))

    @patch("/projects/{project_id:str}", operation_id="updateProject", opt={"action": "projects.update"})
    async def update_project(caller: Caller, project_id: str, data: rest.ProjectUpdate) -> rest.Project:
        """Rename a project."""
        async with db.transaction() as tx:
            renamed = await projects.rename(tx, caller, http.path_id("prj", project_id), data.name)
        return shown(rest.Project, renamed)

    @delete("/projects/{project_id:str}", operation_id="deleteProject")
    async def delete_project(caller: Caller, project_id: str) -> None:
        """Close a project for good; refused while anything lives in it."""
        async with db.transaction() as tx:
            await projects.archive(tx, caller, occupancies, http.path_id("prj", project_id))

    return [list_projects, create_project, get_project, update_project, delete_project]


def _members(db: Database) -> list[Any]:
    @get("/projects/{project_id:str}/members", operation_id="listMembers")
    async def list_members(caller: Caller, project_id: str, page: PageQuery) -> rest.Page[rest.Member]:
        """Who is in a project."""
        async with db.read() as conn:
            found = await members.list_members(
                conn, caller, http.path_id("prj", project_id), after=after(page), limit=page.limit + 1
            )
        return page_of(rest.Member, found, page, by="principal_id")

    @put(
        "/projects/{project_id:str}/members/{principal_id:str}",
        operation_id="putMember",
        opt={"action": "members.write"},
    )
    async def put_member(caller: Caller, project_id: str, principal_id: str, data: rest.MemberPut) -> rest.Member:
        """Give a principal a role in a project."""
        role = policy.parse_role(data.role)
        async with db.transaction() as tx:
            member = await members.put(tx, caller, http.path_id("prj", project_id), _principal(principal_id), role)
        return shown(rest.Member, member)

    @delete("/projects/{project_id:str}/members/{principal_id:str}", operation_id="deleteMember")
    async def delete_member(caller: Caller, project_id: str, principal_id: str) -> None:
        """End a membership."""
        async with db.transaction() as tx:
            await members.remove(tx, caller, http.path_id("prj", project_id), _principal(principal_id))

    return [list_members, put_member, delete_member]


def _service_accounts(db: Database) -> list[Any]:
    @get("/service-accounts", operation_id="listServiceAccounts")
    async def list_accounts(caller: Caller, page: PageQuery) -> rest.Page[rest.ServiceAccount]:
        """Service accounts of the current project."""
        async with db.read() as conn:
            found = await members.list_service_accounts(conn, caller, after=after(page), limit=page.limit + 1)
        return page_of(rest.ServiceAccount, found, page)

    @post("/service-accounts", operation_id="createServiceAccount", opt={"action": "service_accounts.write"})
    async def create_account(
        caller: Caller, once: Once | None, data: rest.ServiceAccountCreate
    ) -> Response[rest.ServiceAccount]:
        """A new principal for programs."""
        role = policy.parse_role(data.role)

        async def effect(tx: Tx) -> bytes:
            made = await members.create_service_account(tx, caller, name=data.name, role=role)
            return encode(rest.ServiceAccount, made)

        return http.created(await idempotency.run(db, once, effect))

    @get("/service-accounts/{account_id:str}", operation_id="getServiceAccount")
    async def get_account(caller: Caller, account_id: str) -> rest.ServiceAccount:
        """One service account."""
        async with db.read() as conn:
            found = await members.show_service_account(conn, caller, http.path_id("sva", account_id))
        return shown(rest.ServiceAccount, found)

    @delete("/service-accounts/{account_id:str}", operation_id="deleteServiceAccount")
    async def delete_account(caller: Caller, account_id: str) -> None:
        """Delete a service account and revoke its keys."""
        async with db.transaction() as tx:
            await members.delete_service_account(tx, caller, http.path_id("sva", account_id))

    return [list_accounts, create_account, get_account, delete_account]


def _keys(db: Database) -> list[Any]:
    @get("/keys", operation_id="listKeys")
    async def list_keys(caller: Caller, page: PageQuery) -> rest.Page[rest.Key]:
        """API keys of the current project, without their secrets."""
        async with db.read() as conn:
            found = await keys.list_keys(conn, caller, after=after(page), limit=page.limit + 1)
        return page_of(rest.Key, found, page)

    @post("/keys", operation_id="createKey", opt={"action": "keys.write"})
    async def create_key(
        caller: Caller, once: Once | None, credential: str, data: rest.KeyCreate
    ) -> Response[rest.KeyCreated]:
        """A new API key. This answer alone shows its secret."""
        new = keys.NewKey(
            name=data.name,
            role=policy.parse_role(data.role),
            service_account_id=data.service_account_id,
            expires_in_s=data.expires_in_s,
        )

        async def effect(tx: Tx) -> bytes:
            key, secret = await keys.create(tx, caller, new)
            sealed = sealing.seal(secret, credential=credential)
            return msgspec.json.encode(rest.KeyCreated(key=shown(rest.Key, key), secret=sealed))

        return http.created(_unsealed(await idempotency.run(db, once, effect), credential))

    @get("/keys/{key_id:str}", operation_id="getKey")
    async def get_key(caller: Caller, key_id: str) -> rest.Key:
        """One API key, without its secret."""
        async with db.read() as conn:
            return shown(rest.Key, await keys.show(conn, caller, http.path_id("key", key_id)))

    @delete("/keys/{key_id:str}", operation_id="revokeKey")
    async def revoke_key(caller: Caller, key_id: str) -> None:
        """Revoke an API key; it stops working within seconds."""
        async with db.transaction() as tx:
            await keys.revoke(tx, caller, http.path_id("key", key_id))

    return [list_keys, create_key, get_key, revoke_key]


def _unsealed(kept: bytes, credential: str) -> bytes:
    """The answer with its secret readable again. What is kept for repeats never holds it in the clear."""
    answer = msgspec.json.decode(kept, type=rest.KeyCreated)
    secret = sealing.unseal(answer.secret, credential=credential)
    if secret is None:
        raise SecretShownBefore("this key was made by an earlier call with another credential")
    return msgspec.json.encode(rest.KeyCreated(key=answer.key, secret=secret))

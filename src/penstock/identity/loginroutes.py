"""REST of logging in: the public document, sessions, and the providers behind them."""

from typing import Annotated, Any

import msgspec
from litestar import Response, Router, delete, get, post, put
from litestar.params import QueryParameter

from penstock.identity.authenticator import Authenticator, bearer
from penstock.identity.errors import SecretShownBefore
from penstock.identity.model import Provider
from penstock.identity.schemas import after, encode, page_of, shown
from penstock.identity.service import policy, providers, sessions
from penstock.kit import http, idempotency, sealing
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Tx
from penstock.kit.errors import missing
from penstock.kit.idempotency import Once
from penstock.kit.paging import PageQuery
from penstock.wire import rest


def router(db: Database, authenticator: Authenticator) -> Router:
    """All of them."""
    return Router(
        path="/",
        tags=["login"],
        route_handlers=[*_login(db, authenticator), *_sessions(db), *_providers(db), *_mappings(db)],
    )


def _name(text: str) -> str:
    """A provider's name, or NotFound: nothing can have a name of another shape."""
    try:
        return msgspec.convert(text, rest.Slug)
    except msgspec.ValidationError as error:
        raise missing("identity provider", text) from error


def _login(db: Database, authenticator: Authenticator) -> list[Any]:
    @get("/login", operation_id="getLogin", opt={"public": True})
    async def get_login() -> rest.LoginDocument:
        """How to log in here: the identity providers and this cloud's client at each."""
        async with db.read() as conn:
            found = await providers.open_providers(conn)
        return rest.LoginDocument(providers=[shown(rest.LoginProvider, provider) for provider in found])

    @post("/sessions", operation_id="createSession", opt={"public": True})
    async def create_session(once: Once | None, data: rest.SessionCreate) -> Response[rest.SessionCreated]:
        """Exchange an identity provider's token for a session. This answer alone shows the session's token."""
        tokens = authenticator.tokens
        provider, claims = await tokens.check(data.token)
        sessions.check_client(claims)
        sessions.check_nonce(claims, data.nonce)
        person = await tokens.person(claims)

        async def effect(tx: Tx) -> bytes:
            opened = await sessions.create(tx, provider, claims, person, data.token)
            answer = shown(rest.SessionCreated, opened)
            sealed = sealing.seal(answer.secret, credential=data.token)
            return msgspec.json.encode(msgspec.structs.replace(answer, secret=sealed))

        return http.created(_unsealed(await idempotency.run(db, once, effect), data.token))

    @delete("/sessions/current", operation_id="logout", opt={"public": True})
    async def logout(credential: str) -> None:
        """End the session whose token is sent; it stops working within seconds."""
        async with db.transaction() as tx:
            await sessions.log_out(tx, bearer(credential))

    return [get_login, create_session, logout]


def _unsealed(kept: bytes, token: str) -> bytes:
    """The answer with its secret readable again. What is kept for repeats never holds it in the clear."""
    answer = msgspec.json.decode(kept, type=rest.SessionCreated)
    secret = sealing.unseal(answer.secret, credential=token)
    if secret is None:
        raise SecretShownBefore("this session was made by an earlier call with another token")
    return msgspec.json.encode(msgspec.structs.replace(answer, secret=secret))


def _sessions(db: Database) -> list[Any]:
    @get("/sessions", operation_id="listSessions")
    async def list_sessions(
        caller: Caller,
        page: PageQuery,
        principal_id: Annotated[
            str | None, QueryParameter(required=False, description="Another person's; operators only.")
        ] = None,
    ) -> rest.Page[rest.LoginSession]:
        """The caller's sessions, without their tokens; ended ones for a month."""
        whose = None if principal_id is None else http.path_id("usr", principal_id)
        start = after(page)
        async with db.read() as conn:
            found = await sessions.list_sessions(conn, caller, whose, after=start, limit=page.limit + 1)
        return page_of(rest.LoginSession, found, page, by="id")

    @delete("/sessions/{session_id:str}", operation_id="revokeSession")
    async def revoke_session(caller: Caller, session_id: str) -> None:
        """End a session; it stops working within seconds."""
        async with db.transaction() as tx:
            await sessions.revoke(tx, caller, http.path_id("ses", session_id))

    return [list_sessions, revoke_session]


def _providers(db: Database) -> list[Any]:
    @get("/identity-providers", operation_id="listIdentityProviders")
    async def list_providers(caller: Caller, page: PageQuery) -> rest.Page[rest.IdentityProvider]:
        """Identity providers; operators only."""
        async with db.read() as conn:
            found = await providers.list_providers(conn, caller, after=after(page), limit=page.limit + 1)
        return page_of(rest.IdentityProvider, found, page, by="name")

    @put("/identity-providers/{name:str}", operation_id="putIdentityProvider", opt={"action": "providers.write"})
    async def put_provider(caller: Caller, name: str, data: rest.ProviderPut) -> rest.IdentityProvider:
        """Make or change an identity provider; operators only."""
        wanted = Provider(name=_name(name), **msgspec.structs.asdict(data))
        async with db.transaction() as tx:
            return shown(rest.IdentityProvider, await providers.put(tx, caller, wanted))

    @get("/identity-providers/{name:str}", operation_id="getIdentityProvider")
    async def get_provider(caller: Caller, name: str) -> rest.IdentityProvider:
        """One identity provider; operators only."""
        async with db.read() as conn:
            return shown(rest.IdentityProvider, await providers.show(conn, caller, _name(name)))

    @delete("/identity-providers/{name:str}", operation_id="deleteIdentityProvider")
    async def delete_provider(caller: Caller, name: str) -> None:
        """Remove an identity provider with its mappings; its people's sessions end. Operators only."""
        async with db.transaction() as tx:
            await providers.remove(tx, caller, _name(name))

    return [list_providers, put_provider, get_provider, delete_provider]


def _mappings(db: Database) -> list[Any]:
    @get("/identity-providers/{name:str}/mappings", operation_id="listGroupMappings")
    async def list_mappings(caller: Caller, name: str, page: PageQuery) -> rest.Page[rest.GroupMapping]:
        """What the provider's groups may do; operators only."""
        start = after(page)
        async with db.read() as conn:
            found = await providers.list_mappings(conn, caller, _name(name), after=start, limit=page.limit + 1)
        return page_of(rest.GroupMapping, found, page, by="id")

    @post(
        "/identity-providers/{name:str}/mappings", operation_id="createGroupMapping", opt={"action": "providers.write"}
    )
    async def create_mapping(
        caller: Caller, name: str, once: Once | None, data: rest.MappingCreate
    ) -> Response[rest.GroupMapping]:
        """Let a group have a role in a project or an organisation, or be operators; operators only."""
        new = providers.NewMapping(
            group=data.group,
            role=None if data.role is None else policy.parse_role(data.role),
            project_id=data.project_id,
            organisation_id=data.organisation_id,
            operator=data.operator,
        )

        async def effect(tx: Tx) -> bytes:
            made = await providers.map_group(tx, caller, _name(name), new)
            return encode(rest.GroupMapping, made)

        return http.created(await idempotency.run(db, once, effect))

    @delete("/identity-providers/{name:str}/mappings/{mapping_id:str}", operation_id="deleteGroupMapping")
    async def delete_mapping(caller: Caller, name: str, mapping_id: str) -> None:
        """Take from a group what a mapping gave it; operators only."""
        async with db.transaction() as tx:
            await providers.unmap_group(tx, caller, _name(name), http.path_id("map", mapping_id))

    return [list_mappings, create_mapping, delete_mapping]

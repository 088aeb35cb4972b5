"""People who come in with an identity provider's token or with a session: who they are, and in which project.

What a person may do in a project is the most powerful role that is configured for them there, by hand or for one of the
groups that their login carries; nothing is granted by default, and nobody is an operator but by a mapping that says so.
"""

import time
from collections.abc import Callable
from typing import Final

from penstock.identity import store
from penstock.identity.errors import NoRole, ProjectRequired
from penstock.identity.keysets import KeySets
from penstock.identity.model import (
    DEFAULT_ORGANISATION,
    DEFAULT_PROJECT,
    OPERATOR_ACTIONS,
    Claims,
    Grant,
    Person,
    PrincipalKind,
    Provider,
    Role,
    actions,
)
from penstock.identity.store import logins, providers
from penstock.identity.tokens import LEEWAY_S, outline, verify
from penstock.kit import audit, outbox
from penstock.kit.audit import Actor
from penstock.kit.caller import Caller, Login
from penstock.kit.db import Database, Reader, Tx
from penstock.kit.errors import NotFound, Unauthenticated, missing
from penstock.kit.ids import is_id, new_id
from penstock.kit.outbox import Event

#: How many projects an error names to choose from.
_NAMED_MAX: Final = 10


class Tokens:
    """Checks providers' tokens with their keys."""

    def __init__(self, db: Database, keys: KeySets, *, clock: Callable[[], float] = time.time) -> None:
        self._db = db
        self._keys = keys
        self._clock = clock

    async def check(self, token: str) -> tuple[Provider, Claims]:
        """What a configured provider says with this token; Unauthenticated for any other."""
        read = outline(token)
        async with self._db.read() as conn:
            provider = await providers.find_by_issuer(conn, read.issuer)
        if provider is None:
            raise Unauthenticated("the token's issuer is not known here")
        return provider, verify(token, await self._keys.find(read), provider, now=self._clock())

    async def person(self, claims: Claims) -> Person:
        """The person whom the claims are about; made known if this is the first time."""
        async with self._db.read() as conn:
            found = await logins.find_person(conn, claims.issuer, claims.subject)
        if found is None:
            async with self._db.transaction() as tx:
                found = await _make_known(tx, claims)
        if found.disabled:
            raise Unauthenticated("this user is disabled")
        return found


async def _make_known(tx: Tx, claims: Claims) -> Person:
    """A row for the person. It gives no right to anything."""
    await logins.lock_person(tx, claims.issuer, claims.subject)
    if (found := await logins.find_person(tx, claims.issuer, claims.subject)) is not None:
        return found
    user_id = new_id("usr")
    await store.insert_principal(
        tx, principal_id=user_id, kind=PrincipalKind.USER, display_name=claims.display_name, operator=False
    )
    await store.insert_user(tx, user_id=user_id, issuer=claims.issuer, subject=claims.subject)
    detail = {"issuer": claims.issuer, "subject": claims.subject}
    await audit.record(tx, Actor(id=user_id, kind=PrincipalKind.USER), "users.create", user_id, detail=detail)
    payload = {"user_id": user_id, "display_name": claims.display_name}
    event = Event(
        type="identity.user_created",
        aggregate_id=user_id,
        version=1,
        organisation_id=None,
        project_id=None,
        payload=payload,
    )
    await outbox.append(tx, event)
    return Person(id=user_id, display_name=claims.display_name, disabled=False)


async def caller_of(conn: Reader, person: Person, login: Login, project: str | None) -> Caller:
    """The person acting in `project`, or in their only one; NotFound, NoRole or ProjectRequired otherwise."""
    operator = await providers.maps_to_operator(conn, login.provider, login.groups)
    if operator:
        return await _operator(conn, person, login, project)
    asked = project if project is None or is_id("prj", project) else ""
    found = await logins.grants(
        conn,
        principal_id=person.id,
        provider=login.provider,
        groups=login.groups,
        project_id=asked,
        limit=_NAMED_MAX + 1,
    )
    grant = _only(found, project)
    return _caller(person, login, grant.project_id, grant.organisation_id, grant.role, operator=False)


async def _operator(conn: Reader, person: Person, login: Login, project: str | None) -> Caller:
    """Operators act anywhere; in the default project if they say nothing."""
    if project is None or project == DEFAULT_PROJECT:
        return _caller(person, login, DEFAULT_PROJECT, DEFAULT_ORGANISATION, Role.OWNER, operator=True)
    found = await store.find_project(conn, project) if is_id("prj", project) else None
    if found is None:
        raise missing("project", project, field="Penstock-Project")
    return _caller(person, login, found.id, found.organisation_id, Role.OWNER, operator=True)


def _only(found: list[Grant], asked: str | None) -> Grant:
    if len(found) == 1:
        return found[0]
    if asked is not None:
        raise missing("project", asked, field="Penstock-Project")
    if not found:
        raise NoRole("you have no role in any project; ask an operator to map one of your groups, or to add you")
    named = ", ".join(f"{grant.project_id} ({grant.name})" for grant in found[:_NAMED_MAX])
    more = " and more" if len(found) > _NAMED_MAX else ""
    raise ProjectRequired(f"choose a project: {named}{more}", field="Penstock-Project")


def _caller(
    person: Person, login: Login, project_id: str, organisation_id: str, role: Role, *, operator: bool
) -> Caller:
    return Caller(
        principal_id=person.id,
        principal_kind=PrincipalKind.USER,
        display_name=person.display_name,
        organisation_id=organisation_id,
        project_id=project_id,
        role=role,
        actions=actions(role, operator=operator),
        operator=operator,
        operators_only=OPERATOR_ACTIONS,
        login=login,
    )


async def still_granted(conn: Reader, caller: Caller, *, now: float) -> bool:
    """Whether the login still works and still allows all that it did when a long exchange began."""
    login = caller.login
    assert login is not None
    if login.expires is not None:
        live = login.expires + LEEWAY_S > now and await logins.principal_in_use(
            conn, caller.principal_id, login.provider
        )
    else:
        live = await logins.session_is_live(conn, login.id)
    if not live:
        return False
    person = Person(id=caller.principal_id, display_name=caller.display_name, disabled=False)
    try:
        again = await caller_of(conn, person, login, caller.project_id)
    except NotFound:
        return False
    return caller.actions <= again.actions

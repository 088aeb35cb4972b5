"""Sessions: a provider's token exchanged for an opaque one that can be revoked. Each provider's token works once.

Only hashes are kept. The groups are those of the token: what the provider changes counts from the next login on, and
what operators change in the mappings counts at once.
"""

import hmac
import secrets
from dataclasses import dataclass
from typing import Final

from penstock.identity.credentials import SESSION_PREFIX, digest
from penstock.identity.errors import TokenUsed
from penstock.identity.model import Claims, Person, PrincipalKind, Project, Provider, Session
from penstock.identity.store import logins, providers
from penstock.kit import audit
from penstock.kit.audit import Actor
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import Unauthenticated, missing
from penstock.kit.ids import new_id
from penstock.wire import subjects

#: Live sessions of one person; the oldest gives way.
SESSIONS_MAX: Final = 50
PROJECTS_SHOWN_MAX: Final = 100
_FORGOTTEN_PER_LOGIN_MAX: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A new session and what it is good for."""

    session: Session
    secret: str
    display_name: str
    operator: bool
    projects: list[Project]


def check_client(claims: Claims) -> None:
    """Only what a person's login gave becomes a session: it would outlive an access token that others hold."""
    if not claims.to_client:
        raise Unauthenticated("a session is made from an ID token of this cloud's client; use this token as it is")


def check_nonce(claims: Claims, nonce: str | None) -> None:
    """A token from a browser's login carries the nonce of whoever began it, and is taken from nobody else."""
    if not hmac.compare_digest((claims.nonce or "").encode(), (nonce or "").encode()):
        raise Unauthenticated("the token does not carry this nonce")


async def create(tx: Tx, provider: Provider, claims: Claims, person: Person, token: str) -> Opened:
    """A session of the person with the groups that the token carries."""
    secret = SESSION_PREFIX + secrets.token_urlsafe(32)
    made = await logins.insert_session(
        tx,
        session_id=new_id("ses"),
        digest=digest(secret),
        token_digest=digest(token),
        principal_id=person.id,
        provider=provider.name,
        groups=claims.groups,
        session_s=provider.session_s,
    )
    if made is None:
        raise TokenUsed("this token was exchanged for a session before; log in again")
    await logins.end_oldest(tx, person.id, keep=SESSIONS_MAX)
    await logins.forget_ended(tx, limit=_FORGOTTEN_PER_LOGIN_MAX)
    await _record(tx, _actor(person.id), "sessions.create", made)
    return Opened(
        session=made,
        secret=secret,
        display_name=person.display_name,
        operator=await providers.maps_to_operator(tx, provider.name, claims.groups),
        projects=await logins.granted_projects(
            tx,
            principal_id=person.id,
            provider=provider.name,
            groups=claims.groups,
            after="",
            limit=PROJECTS_SHOWN_MAX,
        ),
    )


async def list_sessions(conn: Reader, caller: Caller, whose: str | None, *, after: str, limit: int) -> list[Session]:
    """The caller's own; anyone's for operators who may manage users."""
    if whose is not None and whose != caller.principal_id:
        caller.require("users.write")
    return await logins.list_sessions(conn, whose or caller.principal_id, after=after, limit=limit)


async def revoke(tx: Tx, caller: Caller, session_id: str) -> None:
    """End a session of one's own; operators who may manage users end anyone's. A second time changes nothing."""
    own = None if "users.write" in caller.actions else caller.principal_id
    found = await logins.revoke_session(tx, session_id, principal_id=own)
    if found is None:
        raise missing("session", session_id)
    session, ended = found
    if ended:
        await _record(tx, caller.actor, "sessions.revoke", session)
        tx.hint(subjects.REVOKED)


async def log_out(tx: Tx, secret: str) -> None:
    """End the session that this is the token of. Whoever holds it may, with or without a role anywhere."""
    found = await logins.find_login(tx, digest(secret)) if secret.startswith(SESSION_PREFIX) else None
    if found is None:
        raise Unauthenticated("the session is over")
    ended = await logins.revoke_session(tx, found.id, principal_id=None)
    assert ended is not None
    await _record(tx, _actor(found.principal_id), "sessions.revoke", ended[0])
    tx.hint(subjects.REVOKED)


def _actor(user_id: str) -> Actor:
    return Actor(id=user_id, kind=PrincipalKind.USER)


async def _record(tx: Tx, actor: Actor, action: str, session: Session) -> None:
    detail = {"provider": session.provider, "principal_id": session.principal_id}
    await audit.record(tx, actor, action, session.id, detail=detail)

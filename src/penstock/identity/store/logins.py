"""SQL of people who log in with an identity provider: their rows, their sessions, and what they are granted."""
# ruff: noqa: S608 (only constant lists of columns are interpolated; values are always bound)

from collections.abc import Sequence
from typing import Final

import msgspec

from penstock.identity.model import Grant, Person, Project, Session, SessionLogin
from penstock.kit.db import Reader, Tx

_SESSION: Final = "id, principal_id, provider, groups, created_at, expires_at, revoked_at, last_used_at"
#: What a person may do in projects: by hand-made membership, and by each of their groups. Always read together, never
#: written into one another.
_GRANTED: Final = """
select p.id, p.organisation_id, p.name, p.version, p.created_at, r.role
  from (select m.project_id, null::text as organisation_id, m.role
          from identity.members m where m.principal_id = $1
        union all
        select g.project_id, g.organisation_id, g.role
          from identity.group_roles g join identity.providers v on v.name = g.provider and v.enabled
         where g.provider = $2 and g.group_name = any($3) and not g.operator) r
  join identity.projects p on (p.id = r.project_id or p.organisation_id = r.organisation_id) and p.archived_at is null
"""


async def find_person(conn: Reader, issuer: str, subject: str) -> Person | None:
    """The person of this issuer and subject, disabled ones included."""
    row = await conn.fetchrow(
        "select u.id, p.display_name, p.disabled_at is not null as disabled from identity.users u"
        " join identity.principals p on p.id = u.id where u.issuer = $1 and u.subject = $2",
        issuer,
        subject,
    )
    return msgspec.convert(dict(row), Person) if row else None


async def lock_person(tx: Tx, issuer: str, subject: str) -> None:
    """One at a time makes a person known."""
    await tx.execute("select pg_advisory_xact_lock(hashtextextended($1, 8))", f"{issuer}\n{subject}")


async def principal_in_use(conn: Reader, principal_id: str, provider: str) -> bool:
    """Whether the person is not disabled and the provider not either."""
    return await conn.fetchval(
        "select exists (select 1 from identity.principals p, identity.providers v"
        " where p.id = $1 and p.disabled_at is null and v.name = $2 and v.enabled)",
        principal_id,
        provider,
    )


async def grants(
    conn: Reader, *, principal_id: str, provider: str, groups: Sequence[str], project_id: str | None, limit: int
) -> list[Grant]:
    """The projects, by id, with every role that is configured there for this person or one of their groups."""
    rows = await conn.fetch(
        "select id as project_id, organisation_id, name, array_agg(distinct role) as roles"
        f" from ({_GRANTED}) granted where $4::text is null or id = $4"
        " group by id, organisation_id, name order by id limit $5",
        principal_id,
        provider,
        list(groups),
        project_id,
        limit,
    )
    return [msgspec.convert(dict(row), Grant) for row in rows]


async def granted_projects(
    conn: Reader, *, principal_id: str, provider: str, groups: Sequence[str], after: str, limit: int
) -> list[Project]:
    """The same projects, to be listed."""
    rows = await conn.fetch(
        f"select distinct id, organisation_id, name, version, created_at from ({_GRANTED}) granted"
        " where id > $4 order by id limit $5",
        principal_id,
        provider,
        list(groups),
        after,
        limit,
    )
    return [msgspec.convert(dict(row), Project) for row in rows]


_LOGIN: Final = """
select s.id, s.principal_id, p.display_name, s.provider, s.groups,
       extract(epoch from s.expires_at - now())::float8 as remaining_s
  from identity.sessions s
  join identity.principals p on p.id = s.principal_id and p.disabled_at is null
  join identity.providers v on v.name = s.provider and v.enabled
 where {which} and s.revoked_at is null and s.expires_at > now()
"""


async def find_login(conn: Reader, digest: bytes) -> SessionLogin | None:
    """The live session with this hash."""
    row = await conn.fetchrow(_LOGIN.format(which="s.digest = $1"), digest)
    return msgspec.convert(dict(row), SessionLogin) if row else None


async def session_is_live(conn: Reader, session_id: str) -> bool:
    """Whether the session still works."""
    return await conn.fetchrow(_LOGIN.format(which="s.id = $1"), session_id) is not None


async def insert_session(
    tx: Tx,
    *,
    session_id: str,
    digest: bytes,
    token_digest: bytes,
    principal_id: str,
    provider: str,
    groups: Sequence[str],
    session_s: int,
) -> Session | None:
    """A new session; none if its token was exchanged before."""
    row = await tx.fetchrow(
        "insert into identity.sessions (id, digest, token_digest, principal_id, provider, groups, expires_at)"
        " values ($1, $2, $3, $4, $5, $6, now() + make_interval(secs => $7))"
        f" on conflict (token_digest) do nothing returning {_SESSION}",
        session_id,
        digest,
        token_digest,
        principal_id,
        provider,
        list(groups),
        session_s,
    )
    return msgspec.convert(dict(row), Session) if row else None


async def end_oldest(tx: Tx, principal_id: str, *, keep: int) -> None:
    """Revoke all but the newest sessions of a person."""
    await tx.execute(
        "update identity.sessions set revoked_at = now() where id in (select id from identity.sessions"
        " where principal_id = $1 and revoked_at is null and expires_at > now() order by id desc offset $2)",
        principal_id,
        keep,
    )


async def forget_ended(tx: Tx, *, limit: int) -> None:
    """Delete some sessions that ended long ago; the audit log remembers them, and their tokens are void."""
    await tx.execute(
        "delete from identity.sessions where id in (select id from identity.sessions"
        " where expires_at < now() - interval '30 days' limit $1 for update skip locked)",
        limit,
    )


async def list_sessions(conn: Reader, principal_id: str, *, after: str, limit: int) -> list[Session]:
    """By id; those of one person, ended ones included."""
    rows = await conn.fetch(
        f"select {_SESSION} from identity.sessions where principal_id = $1 and id > $2 order by id limit $3",
        principal_id,
        after,
        limit,
    )
    return [msgspec.convert(dict(row), Session) for row in rows]


async def revoke_session(tx: Tx, session_id: str, *, principal_id: str | None) -> tuple[Session, bool] | None:
    """The session, and whether it was this call that ended it. With a principal, only one of theirs is found."""
    row = await tx.fetchrow(
        f"select {_SESSION} from identity.sessions where id = $1 and ($2::text is null or principal_id = $2)"
        " for update",
        session_id,
        principal_id,
    )
    if row is None:
        return None
    ended = await tx.fetchval(
        "update identity.sessions set revoked_at = now() where id = $1 and revoked_at is null returning true",
        session_id,
    )
    return msgspec.convert(dict(row), Session), bool(ended)


async def revoke_sessions_of(tx: Tx, principal_id: str) -> None:
    """All of a person's sessions."""
    await tx.execute(
        "update identity.sessions set revoked_at = now() where principal_id = $1 and revoked_at is null", principal_id
    )


async def touch_sessions(tx: Tx, session_ids: list[str]) -> None:
    """These sessions were used in the last minute."""
    await tx.execute("update identity.sessions set last_used_at = now() where id = any($1)", session_ids)

"""All SQL of identity. Private to the domain: takes a connection, returns model values.

Whatever belongs to a project is found only together with its project, so that another's looks absent.
"""
# ruff: noqa: S608 (only constant lists of columns are interpolated; values are always bound)

from collections.abc import Sequence
from datetime import datetime
from typing import Final, TypeVar

import asyncpg
import msgspec

from penstock.identity.errors import NameTaken
from penstock.identity.model import (
    Credential,
    Key,
    Member,
    Organisation,
    Project,
    Role,
    ServiceAccount,
    User,
)
from penstock.kit.db import Reader, Row, Tx

T = TypeVar("T")

_PROJECT: Final = "id, organisation_id, name, version, created_at"
_KEY: Final = "id, name, hint, role, principal_id, project_id, created_at, expires_at, revoked_at, last_used_at"
_CREDENTIAL: Final = """
select k.id as key_id, k.role as key_role, k.project_id as key_project_id, kp.organisation_id as key_organisation_id,
       km.role as key_member_role, pr.id as principal_id, pr.kind as principal_kind, pr.display_name, pr.operator,
       p.id as project_id, p.organisation_id, m.role as member_role,
       extract(epoch from k.expires_at - now())::float8 as remaining_s
  from identity.keys k
  join identity.principals pr on pr.id = k.principal_id and pr.disabled_at is null
  join identity.projects kp on kp.id = k.project_id and kp.archived_at is null
  join identity.members km on km.project_id = k.project_id and km.principal_id = k.principal_id
  left join identity.projects p on p.id = coalesce($2, k.project_id) and p.archived_at is null
  left join identity.members m on m.project_id = p.id and m.principal_id = pr.id
 where {which} and k.revoked_at is null and (k.expires_at is null or k.expires_at > now())
"""
_BY_DIGEST: Final = _CREDENTIAL.format(which="k.digest = $1")
_BY_ID: Final = _CREDENTIAL.format(which="k.id = $1")


async def find_credential(conn: Reader, digest: bytes, project_id: str | None) -> Credential | None:
    """The valid key with this hash."""
    row = await conn.fetchrow(_BY_DIGEST, digest, project_id)
    return _as(Credential, row) if row else None


async def find_credential_by_id(conn: Reader, key_id: str) -> Credential | None:
    """The key, if it is valid now."""
    row = await conn.fetchrow(_BY_ID, key_id, None)
    return _as(Credential, row) if row else None


def _as(cls: type[T], row: Row) -> T:
    """The row as a value of the model; roles become roles."""
    return msgspec.convert(dict(row), cls)


async def touch_keys(tx: Tx, key_ids: list[str]) -> None:
    """These keys were used in the last minute."""
    await tx.execute("update identity.keys set last_used_at = now() where id = any($1)", key_ids)


async def insert_organisation(tx: Tx, *, organisation_id: str, name: str) -> Organisation:
    """A new organisation."""
    row = await tx.fetchrow(
        "insert into identity.organisations (id, name) values ($1, $2) returning id, name, created_at",
        organisation_id,
        name,
    )
    assert row is not None
    return _as(Organisation, row)


async def list_organisations(conn: Reader, *, only: str | None, after: str, limit: int) -> list[Organisation]:
    """By id; `only` restricts to one."""
    rows = await conn.fetch(
        "select id, name, created_at from identity.organisations"
        " where ($1::text is null or id = $1) and id > $2 order by id limit $3",
        only,
        after,
        limit,
    )
    return [_as(Organisation, row) for row in rows]


async def organisation_exists(conn: Reader, organisation_id: str) -> bool:
    """Whether there is such an organisation."""
    return await conn.fetchval("select exists (select 1 from identity.organisations where id = $1)", organisation_id)


async def organisation_name(conn: Reader, organisation_id: str) -> str | None:
    """What an organisation is called; none when there is none."""
    return await conn.fetchval("select name from identity.organisations where id = $1", organisation_id)


async def project_names(conn: Reader, project_ids: Sequence[str]) -> dict[str, str]:
    """What projects are called, archived ones included."""
    rows = await conn.fetch("select id, name from identity.projects where id = any($1::text[])", list(project_ids))
    return {row["id"]: row["name"] for row in rows}


async def insert_project(tx: Tx, *, project_id: str, organisation_id: str, name: str) -> Project:
    """A new project; its name is free within the organisation, or NameTaken."""
    try:
        row = await tx.fetchrow(
            f"insert into identity.projects (id, organisation_id, name) values ($1, $2, $3) returning {_PROJECT}",
            project_id,
            organisation_id,
            name,
        )
    except asyncpg.UniqueViolationError as error:
        raise NameTaken("name: another project of the organisation has it", field="name") from error
    assert row is not None
    return _as(Project, row)


async def find_project(conn: Reader, project_id: str) -> Project | None:
    """The project, unless archived."""
    row = await conn.fetchrow(
        f"select {_PROJECT} from identity.projects where id = $1 and archived_at is null", project_id
    )
    return _as(Project, row) if row else None


async def list_projects(
    conn: Reader, *, only: str | None, organisation_id: str | None, member_id: str | None, after: str, limit: int
) -> list[Project]:
    """By id: one, or those of an organisation that a principal is a member of, or all."""
    rows = await conn.fetch(
        f"select {_PROJECT} from identity.projects p where archived_at is null"
        " and ($1::text is null or id = $1) and ($2::text is null or organisation_id = $2)"
        " and ($3::text is null or exists (select 1 from identity.members m"
        "      where m.project_id = p.id and m.principal_id = $3))"
        " and id > $4 order by id limit $5",
        only,
        organisation_id,
        member_id,
        after,
        limit,
    )
    return [_as(Project, row) for row in rows]


async def change_project(tx: Tx, project_id: str, *, name: str | None = None, archive: bool = False) -> Project | None:
    """Count one change of the project, and rename or archive it. Its row stays locked until the commit."""
    try:
        row = await tx.fetchrow(
            "update identity.projects set version = version + 1, name = coalesce($2, name),"
            " archived_at = case when $3 then now() end"
            f" where id = $1 and archived_at is null returning {_PROJECT}",
            project_id,
            name,
            archive,
        )
    except asyncpg.UniqueViolationError as error:
        raise NameTaken("name: another project of the organisation has it", field="name") from error
    return _as(Project, row) if row else None


_MEMBER: Final = """
select m.principal_id, p.kind as principal_kind, p.display_name, m.role, m.created_at
  from identity.members m join identity.principals p on p.id = m.principal_id
"""


async def list_members(conn: Reader, project_id: str, *, after: str, limit: int) -> list[Member]:
    """By principal."""
    rows = await conn.fetch(
        _MEMBER + " where m.project_id = $1 and m.principal_id > $2 order by m.principal_id limit $3",
        project_id,
        after,
        limit,
    )
    return [_as(Member, row) for row in rows]


async def find_member(conn: Reader, project_id: str, principal_id: str) -> Member | None:
    """One membership."""
    row = await conn.fetchrow(_MEMBER + " where m.project_id = $1 and m.principal_id = $2", project_id, principal_id)
    return _as(Member, row) if row else None


async def put_member(tx: Tx, project_id: str, principal_id: str, role: Role) -> None:
    """Give or change a role."""
    await tx.execute(
        "insert into identity.members (project_id, principal_id, role) values ($1, $2, $3)"
        " on conflict (project_id, principal_id) do update set role = excluded.role",
        project_id,
        principal_id,
        role,
    )


async def delete_member(tx: Tx, project_id: str, principal_id: str) -> None:
    """Take the role away; the principal's keys in the project stop working with it."""
    await tx.execute(
        "delete from identity.members where project_id = $1 and principal_id = $2", project_id, principal_id
    )


async def count_owners(tx: Tx, project_id: str) -> int:
    """How many owners the project has; the caller holds the project's row."""
    return await tx.fetchval(
        "select count(*) from identity.members where project_id = $1 and role = 'owner'", project_id
    )


async def user_is_known(conn: Reader, principal_id: str, *, organisation_id: str | None) -> bool:
    """Whether there is such a user; with an organisation, whether they are in one of its projects."""
    return await conn.fetchval(
        "select exists (select 1 from identity.users u where u.id = $1 and ($2::text is null or exists ("
        "  select 1 from identity.members m join identity.projects p on p.id = m.project_id"
        "   where m.principal_id = u.id and p.organisation_id = $2)))",
        principal_id,
        organisation_id,
    )


async def insert_principal(
    tx: Tx, *, principal_id: str, kind: str, display_name: str, operator: bool = False
) -> datetime:
    """A new principal; when it was made."""
    return await tx.fetchval(
        "insert into identity.principals (id, kind, display_name, operator) values ($1, $2, $3, $4)"
        " returning created_at",
        principal_id,
        kind,
        display_name,
        operator,
    )


async def insert_user(tx: Tx, *, user_id: str, issuer: str, subject: str) -> None:
    """The user of a principal; issuer and subject together are free, or NameTaken."""
    try:
        await tx.execute(
            "insert into identity.users (id, issuer, subject) values ($1, $2, $3)", user_id, issuer, subject
        )
    except asyncpg.UniqueViolationError as error:
        raise NameTaken("subject: this issuer's subject is known already", field="subject") from error


async def list_users(conn: Reader, *, organisation_id: str | None, after: str, limit: int) -> list[User]:
    """By id; with an organisation, only those in one of its projects."""
    rows = await conn.fetch(
        "select u.id, u.issuer, u.subject, p.display_name, p.created_at, p.disabled_at"
        "  from identity.users u join identity.principals p on p.id = u.id"
        " where u.id > $2 and ($1::text is null or exists (select 1 from identity.members m"
        "   join identity.projects j on j.id = m.project_id where m.principal_id = u.id and j.organisation_id = $1))"
        " order by u.id limit $3",
        organisation_id,
        after,
        limit,
    )
    return [_as(User, row) for row in rows]


_ACCOUNT: Final = """
select s.id, s.project_id, p.display_name as name, m.role, p.created_at
  from identity.service_accounts s
  join identity.principals p on p.id = s.id and p.disabled_at is null
  join identity.members m on m.project_id = s.project_id and m.principal_id = s.id
"""


async def insert_service_account(tx: Tx, *, account_id: str, project_id: str) -> None:
    """The service account of a principal."""
    await tx.execute("insert into identity.service_accounts (id, project_id) values ($1, $2)", account_id, project_id)


async def list_service_accounts(conn: Reader, project_id: str, *, after: str, limit: int) -> list[ServiceAccount]:
    """By id."""
    rows = await conn.fetch(
        _ACCOUNT + " where s.project_id = $1 and s.id > $2 order by s.id limit $3", project_id, after, limit
    )
    return [_as(ServiceAccount, row) for row in rows]


async def find_service_account(conn: Reader, project_id: str, account_id: str) -> ServiceAccount | None:
    """One of the project's service accounts."""
    row = await conn.fetchrow(_ACCOUNT + " where s.project_id = $1 and s.id = $2", project_id, account_id)
    return _as(ServiceAccount, row) if row else None


async def set_user_disabled(tx: Tx, user_id: str, *, disabled: bool) -> User | None:
    """Shut a person out, or let them in again."""
    row = await tx.fetchrow(
        "update identity.principals p set disabled_at = case when $2 then coalesce(disabled_at, now()) end"
        "  from identity.users u where u.id = p.id and p.id = $1"
        " returning u.id, u.issuer, u.subject, p.display_name, p.created_at, p.disabled_at",
        user_id,
        disabled,
    )
    return _as(User, row) if row else None


async def disable_principal(tx: Tx, principal_id: str) -> None:
    """Nothing of it works any more; its rows stay for the audit log."""
    await tx.execute("update identity.principals set disabled_at = now() where id = $1", principal_id)


async def remaining_s(tx: Tx, key_id: str) -> float | None:
    """How long the key still works, counted from the start of the transaction; none for one that never expires."""
    return await tx.fetchval(
        "select extract(epoch from expires_at - now())::float8 from identity.keys where id = $1", key_id
    )


async def insert_key(
    tx: Tx,
    *,
    key_id: str,
    digest: bytes,
    hint: str,
    name: str,
    role: Role,
    principal_id: str,
    project_id: str,
    expires_in_s: float | None,
) -> Key:
    """A new key, by its hash."""
    row = await tx.fetchrow(
        "insert into identity.keys (id, digest, hint, name, role, principal_id, project_id, expires_at)"
        " values ($1, $2, $3, $4, $5, $6, $7, now() + make_interval(secs => $8))"
        f" returning {_KEY}",
        key_id,
        digest,
        hint,
        name,
        role,
        principal_id,
        project_id,
        expires_in_s,
    )
    assert row is not None
    return _as(Key, row)


async def list_keys(conn: Reader, project_id: str, *, after: str, limit: int) -> list[Key]:
    """By id, revoked ones included."""
    rows = await conn.fetch(
        f"select {_KEY} from identity.keys where project_id = $1 and id > $2 order by id limit $3",
        project_id,
        after,
        limit,
    )
    return [_as(Key, row) for row in rows]


async def find_key(conn: Reader, project_id: str, key_id: str) -> Key | None:
    """One of the project's keys."""
    row = await conn.fetchrow(f"select {_KEY} from identity.keys where project_id = $1 and id = $2", project_id, key_id)
    return _as(Key, row) if row else None


async def revoke_key(tx: Tx, project_id: str, key_id: str) -> Key | None:
    """The key, just revoked; none if it was before."""
    row = await tx.fetchrow(
        "update identity.keys set revoked_at = now()"
        f" where project_id = $1 and id = $2 and revoked_at is null returning {_KEY}",
        project_id,
        key_id,
    )
    return _as(Key, row) if row else None


async def revoke_keys_of(tx: Tx, principal_id: str) -> list[Key]:
    """All of a principal's keys."""
    rows = await tx.fetch(
        f"update identity.keys set revoked_at = now() where principal_id = $1 and revoked_at is null returning {_KEY}",
        principal_id,
    )
    return [_as(Key, row) for row in rows]

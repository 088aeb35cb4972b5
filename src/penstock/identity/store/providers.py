"""SQL of identity providers and of what their groups may do."""
# ruff: noqa: S608 (only constant lists of columns are interpolated; values are always bound)

from collections.abc import Sequence
from typing import Final

import asyncpg
import msgspec

from penstock.identity.errors import IssuerTaken, MappingExists
from penstock.identity.model import GroupMapping, Provider, Role
from penstock.kit.db import Reader, Row, Tx

_PROVIDER: Final = (
    "name, issuer, client_id, client_secret, audiences, scopes, groups_claim, session_s, enabled, created_at"
)
_MAPPING: Final = 'id, provider, group_name as "group", role, project_id, organisation_id, operator, created_at'


async def put(tx: Tx, provider: Provider) -> Provider:
    """Make or change a provider; its issuer is nobody else's, or IssuerTaken."""
    try:
        row = await tx.fetchrow(
            "insert into identity.providers (name, issuer, client_id, client_secret, audiences, scopes, groups_claim,"
            " session_s, enabled) values ($1, $2, $3, $4, $5, $6, $7, $8, $9) on conflict (name) do update set"
            " client_id = $3, client_secret = $4, audiences = $5, scopes = $6, groups_claim = $7, session_s = $8,"
            f" enabled = $9 returning {_PROVIDER}",
            provider.name,
            provider.issuer,
            provider.client_id,
            provider.client_secret,
            provider.audiences,
            provider.scopes,
            provider.groups_claim,
            provider.session_s,
            provider.enabled,
        )
    except asyncpg.UniqueViolationError as error:
        raise IssuerTaken("issuer: another provider has it", field="issuer") from error
    assert row is not None
    return _provider(row)


async def find(conn: Reader, name: str, *, lock: bool = False) -> Provider | None:
    """The provider of this name."""
    suffix = " for update" if lock else ""
    row = await conn.fetchrow(f"select {_PROVIDER} from identity.providers where name = $1{suffix}", name)
    return _provider(row) if row else None


async def find_by_issuer(conn: Reader, issuer: str) -> Provider | None:
    """The enabled provider with exactly this issuer."""
    row = await conn.fetchrow(f"select {_PROVIDER} from identity.providers where issuer = $1 and enabled", issuer)
    return _provider(row) if row else None


async def list_all(conn: Reader, *, after: str, limit: int) -> list[Provider]:
    """By name."""
    rows = await conn.fetch(
        f"select {_PROVIDER} from identity.providers where name > $1 order by name limit $2", after, limit
    )
    return [_provider(row) for row in rows]


async def list_enabled(conn: Reader, limit: int) -> list[Provider]:
    """By name, those that people may log in with."""
    rows = await conn.fetch(f"select {_PROVIDER} from identity.providers where enabled order by name limit $1", limit)
    return [_provider(row) for row in rows]


async def delete(tx: Tx, name: str) -> Provider | None:
    """The provider, just deleted with its mappings and sessions."""
    row = await tx.fetchrow(f"delete from identity.providers where name = $1 returning {_PROVIDER}", name)
    return _provider(row) if row else None


async def insert_mapping(
    tx: Tx,
    *,
    mapping_id: str,
    provider: str,
    group: str,
    role: Role | None,
    project_id: str | None,
    organisation_id: str | None,
    operator: bool,
) -> GroupMapping:
    """A new mapping; the group has none with this scope, or MappingExists."""
    try:
        row = await tx.fetchrow(
            "insert into identity.group_roles (id, provider, group_name, role, project_id, organisation_id, operator)"
            f" values ($1, $2, $3, $4, $5, $6, $7) returning {_MAPPING}",
            mapping_id,
            provider,
            group,
            role,
            project_id,
            organisation_id,
            operator,
        )
    except asyncpg.UniqueViolationError as error:
        raise MappingExists("this group is mapped there already; remove that mapping first", field="group") from error
    assert row is not None
    return _mapping(row)


async def list_mappings(conn: Reader, provider: str, *, after: str, limit: int) -> list[GroupMapping]:
    """By id."""
    rows = await conn.fetch(
        f"select {_MAPPING} from identity.group_roles where provider = $1 and id > $2 order by id limit $3",
        provider,
        after,
        limit,
    )
    return [_mapping(row) for row in rows]


async def delete_mapping(tx: Tx, provider: str, mapping_id: str) -> GroupMapping | None:
    """The mapping, just deleted."""
    row = await tx.fetchrow(
        f"delete from identity.group_roles where provider = $1 and id = $2 returning {_MAPPING}", provider, mapping_id
    )
    return _mapping(row) if row else None


async def maps_to_operator(conn: Reader, provider: str, groups: Sequence[str]) -> bool:
    """Whether one of the groups is mapped to operators, and the provider is in use."""
    return await conn.fetchval(
        "select exists (select 1 from identity.group_roles g"
        " join identity.providers v on v.name = g.provider and v.enabled"
        " where g.provider = $1 and g.group_name = any($2) and g.operator)",
        provider,
        list(groups),
    )


def _provider(row: Row) -> Provider:
    return msgspec.convert(dict(row), Provider)


def _mapping(row: Row) -> GroupMapping:
    return msgspec.convert(dict(row), GroupMapping)

"""The rows of secrets and their versions. Values are here only in their envelopes."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from penstock.kit.db import Reader, Row, Tx
from penstock.secrets.model import Envelope, Measure, Place, Secret, Version

_COLUMNS: Final = "name, version, created_at, created_by, updated_at, updated_by"


async def lock_project(tx: Tx, project_id: str) -> None:
    """Writers of one project take turns: its secrets are counted."""
    await tx.execute("select pg_advisory_xact_lock(hashtextextended($1, 11))", f"secrets {project_id}")


async def count(conn: Reader, project_id: str) -> int:
    """How many secrets the project has."""
    return await conn.fetchval(
        "select count(*) from secrets.secrets where project_id = $1 and deleted_at is null", project_id
    )


async def find(conn: Reader, project_id: str, name: str) -> Secret | None:
    """One secret."""
    row = await conn.fetchrow(
        f"select {_COLUMNS} from secrets.secrets"  # noqa: S608
        " where project_id = $1 and name = $2 and deleted_at is null",
        project_id,
        name,
    )
    return Secret(**row) if row else None


async def page(conn: Reader, project_id: str, *, after: str, limit: int) -> list[Secret]:
    """The project's secrets, by name."""
    rows = await conn.fetch(
        f"select {_COLUMNS} from secrets.secrets"  # noqa: S608
        " where project_id = $1 and name > $2 and deleted_at is null order by name limit $3",
        project_id,
        after,
        limit,
    )
    return [Secret(**row) for row in rows]


async def versions(conn: Reader, project_id: str, name: str) -> list[Version]:
    """Those that are kept, the newest first."""
    rows = await conn.fetch(
        "select version, created_at, created_by from secrets.versions"
        " where project_id = $1 and name = $2 order by version desc",
        project_id,
        name,
    )
    return [Version(**row) for row in rows]


async def count_versions(conn: Reader, project_id: str, name: str) -> int:
    """How many of the secret's versions are kept."""
    return await conn.fetchval(
        "select count(*) from secrets.versions where project_id = $1 and name = $2", project_id, name
    )


async def advance(tx: Tx, project_id: str, name: str, *, by: str) -> Secret:
    """The secret with its next version; one that was deleted goes on counting, as new."""
    row = await tx.fetchrow(
        f"""
        insert into secrets.secrets as s (project_id, name, version, created_by, updated_by)
        values ($1, $2, 1, $3, $3)
        on conflict (project_id, name) do update set
            version = s.version + 1, updated_at = clock_timestamp(), updated_by = excluded.updated_by,
            created_at = case when s.deleted_at is null then s.created_at else clock_timestamp() end,
            created_by = case when s.deleted_at is null then s.created_by else excluded.created_by end,
            deleted_at = null
        returning {_COLUMNS}
        """,  # noqa: S608
        project_id,
        name,
        by,
    )
    assert row is not None
    return Secret(**row)


async def insert_version(
    tx: Tx, place: Place, envelope: Envelope, *, size: int, fits_env: bool, created_by: str
) -> None:
    """A new version; those before it are superseded."""
    await supersede(tx, place.project_id, place.name)
    await tx.execute(
        "insert into secrets.versions (project_id, name, version, bytes, fits_env, sealed, wrapped_key, key_id,"
        " created_by) values ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        place.project_id,
        place.name,
        place.version,
        size,
        fits_env,
        envelope.sealed,
        envelope.wrapped_key,
        envelope.key_id,
        created_by,
    )


async def supersede(tx: Tx, project_id: str, name: str) -> None:
    """No version of it is current any more."""
    await tx.execute(
        "update secrets.versions set superseded_at = clock_timestamp()"
        " where project_id = $1 and name = $2 and superseded_at is null",
        project_id,
        name,
    )


async def delete(tx: Tx, project_id: str, name: str) -> bool:
    """Whether there was such a secret; its versions are superseded."""
    gone = await tx.fetchval(
        "update secrets.secrets set deleted_at = clock_timestamp()"
        " where project_id = $1 and name = $2 and deleted_at is null returning true",
        project_id,
        name,
    )
    await supersede(tx, project_id, name)
    return bool(gone)


async def measures(conn: Reader, project_id: str, names: Sequence[str]) -> dict[str, Measure]:
    """The current versions of these secrets, by name."""
    rows = await conn.fetch(
        "select v.name, v.version, v.bytes, v.fits_env from secrets.secrets s"
        " join secrets.versions v using (project_id, name, version)"
        " where s.project_id = $1 and s.name = any($2) and s.deleted_at is null",
        project_id,
        names,
    )
    return {row["name"]: Measure(**row) for row in rows}


async def envelopes(conn: Reader, places: Sequence[Place]) -> dict[Place, Envelope]:
    """What is stored of these versions."""
    rows = await conn.fetch(
        "select v.* from unnest($1::text[], $2::text[], $3::bigint[]) as w (project_id, name, version)"
        " join secrets.versions v using (project_id, name, version)",
        [place.project_id for place in places],
        [place.name for place in places],
        [place.version for place in places],
    )
    return {_place(row): _envelope(row) for row in rows}


async def lock_under_others(tx: Tx, key_id: str, *, limit: int) -> list[tuple[Place, Envelope]]:
    """Versions whose data key is under another master key, locked."""
    rows = await tx.fetch(
        "select * from secrets.versions where key_id <> $1 limit $2 for update skip locked", key_id, limit
    )
    return [(_place(row), _envelope(row)) for row in rows]


async def put_wrapped_keys(tx: Tx, rewrapped: Sequence[tuple[Place, Envelope]]) -> None:
    """The same data keys under another master key."""
    await tx.executemany(
        "update secrets.versions set wrapped_key = $4, key_id = $5"
        " where project_id = $1 and name = $2 and version = $3",
        [
            (place.project_id, place.name, place.version, envelope.wrapped_key, envelope.key_id)
            for place, envelope in rewrapped
        ],
    )


async def count_by_key(conn: Reader) -> dict[str, int]:
    """How many versions each master key opens."""
    rows = await conn.fetch("select key_id, count(*) as count from secrets.versions group by key_id")
    return {row["key_id"]: row["count"] for row in rows}


@dataclass(frozen=True, slots=True)
class Superseded:
    """A version that is not current, since when."""

    place: Place
    at: datetime


async def superseded(conn: Reader, after: tuple[str, str, int], *, older_than_s: float, limit: int) -> list[Superseded]:
    """Versions that ended so long ago, in order of their key."""
    rows = await conn.fetch(
        "select project_id, name, version, superseded_at from secrets.versions"
        " where superseded_at < clock_timestamp() - make_interval(secs => $4)"
        " and (project_id, name, version) > ($1, $2, $3) order by project_id, name, version limit $5",
        *after,
        older_than_s,
        limit,
    )
    return [Superseded(_place(row), row["superseded_at"]) for row in rows]


async def prune(tx: Tx, places: Sequence[Place]) -> None:
    """Delete these versions, and the rows of deleted secrets of which nothing is left."""
    keys = [(place.project_id, place.name, place.version) for place in places]
    await tx.executemany(
        "delete from secrets.versions"
        " where project_id = $1 and name = $2 and version = $3 and superseded_at is not null",
        keys,
    )
    await tx.executemany(
        "delete from secrets.secrets s where project_id = $1 and name = $2 and deleted_at is not null"
        " and not exists (select 1 from secrets.versions v where v.project_id = s.project_id and v.name = s.name)",
        sorted({key[:2] for key in keys}),
    )


def _place(row: Row) -> Place:
    return Place(project_id=row["project_id"], name=row["name"], version=row["version"])


def _envelope(row: Row) -> Envelope:
    return Envelope(sealed=row["sealed"], wrapped_key=row["wrapped_key"], key_id=row["key_id"])

"""The rows of objects, blobs and usage. Locks are taken in the order blob, key, old blob, usage."""

from typing import Any, Final

from penstock.kit.db import Reader, Row, Tx
from penstock.storage.model import LAST, Listed, Object

_COLUMNS: Final = "project_id, key, blob_id, size, sha256, content_type, created_at, created_by"


async def add_blob(tx: Tx, blob_id: str, project_id: str, *, reserve: int, lease_s: float) -> None:
    """A blob that is about to be written."""
    await tx.execute(
        "insert into storage.blobs (id, project_id, state, bytes, expires_at)"
        " values ($1, $2, 'writing', $3, clock_timestamp() + make_interval(secs => $4))",
        blob_id,
        project_id,
        reserve,
        lease_s,
    )


async def grow_blob(tx: Tx, blob_id: str, *, more: int, lease_s: float) -> bool:
    """Reserve more for it and renew its lease; whether it is still being written."""
    return bool(
        await tx.fetchval(
            "update storage.blobs set bytes = bytes + $2,"
            " expires_at = clock_timestamp() + make_interval(secs => $3)"
            " where id = $1 and state = 'writing' returning true",
            blob_id,
            more,
            lease_s,
        )
    )


async def complete_blob(tx: Tx, blob_id: str, size: int) -> int | None:
    """It is all there: what was reserved for it; none when it was given up before."""
    row = await tx.fetchrow("select bytes from storage.blobs where id = $1 and state = 'writing' for update", blob_id)
    if row is None:
        return None
    await tx.execute(
        "update storage.blobs set state = 'live', bytes = $2, expires_at = null where id = $1", blob_id, size
    )
    return row["bytes"]


async def doom_blob(tx: Tx, blob_id: str, *, only: str, grace_s: float) -> int | None:
    """Have it deleted after a while, if it is in the state `only`; the bytes that this frees."""
    return await tx.fetchval(
        "update storage.blobs set state = 'doomed', expires_at = clock_timestamp() + make_interval(secs => $3)"
        " where id = $1 and state = $2 returning bytes",
        blob_id,
        only,
        grace_s,
    )


async def expired_blobs(conn: Reader, *, limit: int) -> list[str]:
    """Blobs that were given up, or are past their time to go."""
    rows = await conn.fetch(
        "select id from storage.blobs where expires_at < clock_timestamp() order by expires_at limit $1", limit
    )
    return [row["id"] for row in rows]


async def find_blob(tx: Tx, blob_id: str) -> tuple[str, str] | None:
    """Its project and state, locked."""
    row = await tx.fetchrow(
        "select project_id, state from storage.blobs where id = $1 and expires_at < clock_timestamp() for update",
        blob_id,
    )
    return (row["project_id"], row["state"]) if row else None


async def is_live(conn: Reader, blob_id: str) -> bool:
    """Whether an object names it."""
    return bool(await conn.fetchval("select true from storage.blobs where id = $1 and state = 'live'", blob_id))


async def forget_blob(tx: Tx, blob_id: str) -> None:
    """It is gone from the store."""
    await tx.execute("delete from storage.blobs where id = $1 and state = 'doomed'", blob_id)


async def known_blobs(conn: Reader, blob_ids: list[str]) -> set[str]:
    """Those of them that have a row."""
    rows = await conn.fetch("select id from storage.blobs where id = any($1)", blob_ids)
    return {row["id"] for row in rows}


async def install_id(conn: Reader) -> str:
    """Which install this is."""
    return await conn.fetchval("select id from storage.install")


async def reserve(tx: Tx, project_id: str, more: int, *, bytes_max: int) -> bool:
    """Count bytes to the project before they come; whether there is room for them."""
    return bool(
        await tx.fetchval(
            "insert into storage.usage as u (project_id, bytes_used) select $1, $2::bigint where $2 <= $3::bigint"
            " on conflict (project_id) do update set bytes_used = u.bytes_used + $2"
            " where u.bytes_used + $2 <= $3 returning true",
            project_id,
            more,
            bytes_max,
        )
    )


async def free(tx: Tx, project_id: str, fewer: int) -> None:
    """Count bytes back."""
    if fewer:
        await tx.execute(
            "update storage.usage set bytes_used = bytes_used - $2 where project_id = $1", project_id, fewer
        )


async def used(conn: Reader, project_id: str) -> int:
    """What the project uses, reservations included."""
    return await conn.fetchval("select bytes_used from storage.usage where project_id = $1", project_id) or 0


async def lock_key(tx: Tx, project_id: str, key: str) -> Object | None:
    """The object; writers of its key wait until this transaction ends, also where there is none yet."""
    await tx.execute("select pg_advisory_xact_lock(hashtextextended($1, 13))", f"object {project_id} {key}")
    return await find(tx, project_id, key)


async def put(tx: Tx, made: dict[str, Any]) -> Object:
    """Put the row, in the place of another of the same key."""
    names = ("project_id", "key", "blob_id", "size", "sha256", "content_type", "created_by")
    updates = ", ".join(f"{name} = excluded.{name}" for name in names[2:])
    row = await tx.fetchrow(
        f"insert into storage.objects ({', '.join(names)}) values ($1, $2, $3, $4, $5, $6, $7)"  # noqa: S608
        f" on conflict (project_id, key) do update set {updates}, created_at = clock_timestamp() returning {_COLUMNS}",
        *(made[name] for name in names),
    )
    assert row is not None
    return _object(row)


async def delete(tx: Tx, project_id: str, key: str) -> None:
    """Take the row away."""
    await tx.execute("delete from storage.objects where project_id = $1 and key = $2", project_id, key)


async def find(conn: Reader, project_id: str, key: str) -> Object | None:
    """One object."""
    row = await conn.fetchrow(
        f"select {_COLUMNS} from storage.objects where project_id = $1 and key = $2",  # noqa: S608
        project_id,
        key,
    )
    return _object(row) if row else None


async def page(conn: Reader, project_id: str, *, prefix: str, after: str, limit: int) -> Listed:
    """Objects by key. `after` is the key where the page begins, inclusive."""
    rows = await conn.fetch(
        f'select {_COLUMNS} from storage.objects where project_id = $1 and key >= greatest($2, $3 collate "C")'  # noqa: S608
        " and key < $4 order by key limit $5",
        project_id,
        prefix,
        after,
        prefix + LAST,
        limit + 1,
    )
    objects = [_object(row) for row in rows]
    return Listed(objects=objects[:limit], prefixes=[], after=objects[limit].key if len(objects) > limit else "")


#: Each step takes the next key, and then goes on behind it: behind all that share its beginning up to the delimiter,
#: or, for a key by itself, at the least that can follow it. Keys hold no control characters.
_GROUPED: Final = """
with recursive entries as (
    (
        select key, least(position('/' in substr(key, length($2) + 1)), 1) as grouped,
               case position('/' in substr(key, length($2) + 1)) when 0 then key || chr(1)
                    else left(key, length($2) + position('/' in substr(key, length($2) + 1)) - 1) || '0' end as next,
               1 as n
          from storage.objects where project_id = $1 and key >= greatest($2, $3 collate "C") and key < $4
         order by key limit 1
    )
    union all
    select f.* from entries e cross join lateral (
        select key, least(position('/' in substr(key, length($2) + 1)), 1) as grouped,
               case position('/' in substr(key, length($2) + 1)) when 0 then key || chr(1)
                    else left(key, length($2) + position('/' in substr(key, length($2) + 1)) - 1) || '0' end as next,
               e.n + 1 as n
          from storage.objects where project_id = $1 and key >= e.next collate "C" and key < $4
         order by key limit 1
    ) f where e.n < $5
)
select e.grouped, e.next, o.* from entries e join storage.objects o on o.project_id = $1 and o.key = e.key order by e.n
"""


async def grouped_page(conn: Reader, project_id: str, *, prefix: str, after: str, limit: int) -> Listed:
    """The same, with everything below a slash as one common beginning."""
    rows = await conn.fetch(_GROUPED, project_id, prefix, after, prefix + LAST, limit + 1)
    shown = rows[:limit]
    return Listed(
        objects=[_object(row) for row in shown if not row["grouped"]],
        prefixes=[row["next"][:-1] + "/" for row in shown if row["grouped"]],
        after=rows[limit]["key"] if len(rows) > limit else "",
    )


def _object(row: Row) -> Object:
    return Object(**{name: row[name] for name in Object.__dataclass_fields__})

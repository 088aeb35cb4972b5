"""Enrolment tokens (only their digest is kept) and the certificates that were issued, with the revoked ones marked."""

from dataclasses import dataclass
from datetime import datetime

from penstock.kit.db import Reader, Row, Tx
from penstock.kit.ids import new_id


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """A token that waits to be used."""

    id: str
    node_id: str
    node_name: str
    kind: str
    expired: bool


async def insert_token(tx: Tx, *, digest: bytes, node_id: str, kind: str, lives_s: float) -> datetime:
    """Keep the digest; older tokens of the node stop working. Returns when it expires."""
    await tx.execute("delete from fleet.enrolment_tokens where node_id = $1", node_id)
    return await tx.fetchval(
        "insert into fleet.enrolment_tokens (id, digest, node_id, kind, expires_at)"
        " values ($1, $2, $3, $4, clock_timestamp() + make_interval(secs => $5)) returning expires_at",
        new_id("ent"),
        digest,
        node_id,
        kind,
        lives_s,
    )


async def find_token(conn: Reader, digest: bytes) -> TokenRow | None:
    """The token of this digest, without using it."""
    row = await conn.fetchrow(
        "select t.id, t.node_id, n.name as node_name, t.kind, t.expires_at <= clock_timestamp() as expired"
        " from fleet.enrolment_tokens t join fleet.nodes n on n.id = t.node_id where t.digest = $1",
        digest,
    )
    return TokenRow(**dict(row)) if row else None


async def use_token(tx: Tx, token_id: str) -> bool:
    """Whether this call was the one that used it."""
    found = await tx.fetchval(
        "delete from fleet.enrolment_tokens where id = $1 and expires_at > clock_timestamp() returning id", token_id
    )
    return found is not None


async def delete_tokens(tx: Tx, node_id: str) -> None:
    """Nothing can be enrolled as this node any more."""
    await tx.execute("delete from fleet.enrolment_tokens where node_id = $1", node_id)


async def delete_expired_tokens(tx: Tx) -> None:
    """Forget tokens that nobody used; an hour late, so that their holder is told that they expired."""
    await tx.execute("delete from fleet.enrolment_tokens where expires_at < clock_timestamp() - interval '1 hour'")


async def insert(tx: Tx, *, serial: str, node_id: str, not_after: datetime) -> None:
    """A certificate was issued."""
    await tx.execute(
        "insert into fleet.certificates (serial, node_id, not_after) values ($1, $2, $3)", serial, node_id, not_after
    )


async def count_valid(conn: Reader, node_id: str) -> int:
    """How many certificates of the node are good now."""
    return await conn.fetchval(
        "select count(*) from fleet.certificates"
        " where node_id = $1 and revoked_at is null and not_after > clock_timestamp()",
        node_id,
    )


async def revoke_all(tx: Tx, node_id: str) -> list[str]:
    """The serials that are no longer good."""
    rows = await tx.fetch(
        "update fleet.certificates set revoked_at = clock_timestamp()"
        " where node_id = $1 and revoked_at is null returning serial",
        node_id,
    )
    return [row["serial"] for row in rows]


async def delete_old(tx: Tx, *, older_than_s: float) -> None:
    """Forget certificates that ran out long ago: an unknown serial is refused just the same."""
    await tx.execute(
        "delete from fleet.certificates c where not_after < clock_timestamp() - make_interval(secs => $1)",
        older_than_s,
    )


_GOOD = """
select c.serial
  from fleet.certificates c join fleet.nodes n on n.id = c.node_id
 where c.serial = any($1) and c.revoked_at is null and c.not_after > clock_timestamp() and n.state <> 'retired'
"""


async def good(conn: Reader, serials: list[str]) -> set[str]:
    """Those of the serials that were issued, are not revoked, and have not run out."""
    rows: list[Row] = await conn.fetch(_GOOD, serials)
    return {row["serial"] for row in rows}

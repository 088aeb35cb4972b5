"""The audit log's hash chains: one per organisation, linked after the commit by whichever process gets the turn.

Rows are linked in the order of (transaction, sequence), and only once no older transaction runs any more: a link never
has to be put in between later. The chain itself is append-only like the log.
"""

from collections.abc import Sequence
from typing import Final

from penstock.kit.caller import Caller
from penstock.kit.db import Database, Reader, Row, Tx
from penstock.kit.errors import Invalid
from penstock.kit.paging import PageQuery, decode_cursor, encode_cursor
from penstock.wire.auditchain import GENESIS, chain_of, link
from penstock.wire.rest import AuditChain, AuditEntry, ChainedAudit, Page

BATCH: Final = 500
ENTRY: Final = (
    "a.id, a.at, a.actor_id, a.actor_kind, a.action, a.target_id, a.organisation_id, a.project_id,"
    " a.correlation_id, a.detail"
)
_UNLINKED: Final = f"""
select {ENTRY}, a.tx::text as tx, a.seq from kit.audit a
 where (a.tx, a.seq) > ($1::text::xid8, $2) and a.tx < pg_snapshot_xmin(pg_current_snapshot())
 order by a.tx, a.seq limit $3
"""  # noqa: S608
#: One look into the index for each chain: a chain is as long as the log.
_HEADS: Final = """
select n.chain, h.position, h.hash from unnest($1::text[]) n(chain) cross join lateral (
    select position, hash from kit.audit_chain where chain = n.chain order by position desc limit 1) h
"""
_LINKS: Final = f"""
select c.position, c.audit_id, encode(c.hash, 'hex') as hash, a.id is null as gone, {ENTRY}
  from kit.audit_chain c left join kit.audit a on a.id = c.audit_id
 where c.chain = $1 and c.position > $2 order by c.position limit $3
"""  # noqa: S608
_CHAINS: Final = """
with recursive names as (
    select min(chain) as chain from kit.audit_chain
    union all
    select (select min(c.chain) from kit.audit_chain c where c.chain > n.chain) from names n where n.chain is not null
), heads as (
    select n.chain, h.position, encode(h.hash, 'hex') as hash, h.linked_at from names n cross join lateral (
        select position, hash, linked_at from kit.audit_chain where chain = n.chain order by position desc limit 1) h
), progress as (
    select tx, seq from kit.audit_progress
), unlinked as (
    select coalesce(a.organisation_id, $1) as chain, count(*) as n from kit.audit a, progress p
     where (a.tx, a.seq) > (p.tx, p.seq) group by 1
)
select chain, coalesce(position, 0) as position, coalesce(hash, '') as hash, linked_at, coalesce(n, 0) as unlinked
  from heads full join unlinked using (chain) order by chain
"""


async def extend(db: Database) -> int:
    """Link what was committed since the last time; how many rows. Another process at it means nothing to do here."""
    linked = 0
    while True:
        async with db.transaction() as tx:
            batch = await _extend(tx)
        linked += batch
        if batch < BATCH:
            return linked


async def _extend(tx: Tx) -> int:
    progress = await tx.fetchrow("select tx::text as tx, seq from kit.audit_progress for update skip locked")
    if progress is None:
        return 0
    rows = await tx.fetch(_UNLINKED, progress["tx"], progress["seq"], BATCH)
    if rows:
        await _append(tx, rows)
        await tx.execute("update kit.audit_progress set tx = $1::text::xid8, seq = $2", rows[-1]["tx"], rows[-1]["seq"])
    return len(rows)


async def _append(tx: Tx, rows: Sequence[Row]) -> None:
    chains = {chain_of(row["organisation_id"]) for row in rows}
    heads = {row["chain"]: (row["position"], row["hash"]) for row in await tx.fetch(_HEADS, sorted(chains))}
    links: list[tuple[str, int, str, bytes]] = []
    for row in rows:
        chain = chain_of(row["organisation_id"])
        position, before = heads.get(chain, (0, GENESIS))
        heads[chain] = (position + 1, link(before, _entry(row)))
        links.append((chain, position + 1, row["id"], heads[chain][1]))
    await tx.execute(
        "insert into kit.audit_chain (chain, position, audit_id, hash)"
        " select * from unnest($1::text[], $2::bigint[], $3::text[], $4::bytea[])",
        *(list(column) for column in zip(*links, strict=True)),
    )


def _entry(row: Row) -> AuditEntry:
    return AuditEntry(**{name: row[name] for name in AuditEntry.__struct_fields__})


async def chains(conn: Reader, caller: Caller) -> list[AuditChain]:
    """Every chain and where it ends now."""
    caller.require("audit.export")
    rows = await conn.fetch(_CHAINS, chain_of(None))
    return [AuditChain(**dict(row)) for row in rows]


async def page(conn: Reader, caller: Caller, chain: str, query: PageQuery) -> Page[ChainedAudit]:
    """Links of a chain, from its beginning."""
    caller.require("audit.export")
    rows = await conn.fetch(_LINKS, chain, _position(query.cursor), query.limit + 1)
    shown = [
        ChainedAudit(
            position=row["position"],
            audit_id=row["audit_id"],
            hash=row["hash"],
            entry=None if row["gone"] else _entry(row),
        )
        for row in rows[: query.limit]
    ]
    more = len(rows) > query.limit
    return Page(items=shown, next_cursor=encode_cursor("h", shown[-1].position) if more else None)


def _position(text: str | None) -> int:
    if text is None:
        return 0
    match decode_cursor(text):
        case ["h", int(position)]:
            return position
        case _:
            raise Invalid("invalid cursor", field="cursor")

"""Which gateway holds which node's link, the nodes' heartbeats, and the units that they report. All set-based: one
statement serves every link of a gateway."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from penstock.kit.db import Reader, Tx


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkKey:
    """One live connection of a node."""

    node_id: str
    link_id: str
    serial: str


async def upsert(tx: Tx, key: LinkKey, *, gateway_id: str, address: str) -> None:
    """From now on this is the node's link."""
    await tx.execute(
        "insert into fleet.links (node_id, link_id, gateway_id, address, serial) values ($1, $2, $3, $4, $5)"
        " on conflict (node_id) do update set link_id = excluded.link_id, gateway_id = excluded.gateway_id,"
        " address = excluded.address, serial = excluded.serial, connected_at = now()",
        key.node_id,
        key.link_id,
        gateway_id,
        address,
        key.serial,
    )


async def remove(conn: Reader, key: LinkKey) -> None:
    """The connection ended; a newer one of the same node stays."""
    await conn.execute("delete from fleet.links where node_id = $1 and link_id = $2", key.node_id, key.link_id)


async def current(conn: Reader, keys: Sequence[LinkKey]) -> set[str]:
    """The ids of those links that no newer one has superseded."""
    rows = await conn.fetch(
        "select l.link_id from unnest($1::text[], $2::text[]) k(node_id, link_id)"
        " join fleet.links l on l.node_id = k.node_id and l.link_id = k.link_id",
        [key.node_id for key in keys],
        [key.link_id for key in keys],
    )
    return {row["link_id"] for row in rows}


async def find_gateway(conn: Reader, node_id: str) -> str | None:
    """The address of the gateway that holds the node's link."""
    return await conn.fetchval("select address from fleet.links where node_id = $1", node_id)


_BEAT = """
insert into fleet.heartbeats as h (node_id, at, skew_s, listed_at, trouble)
select b.node_id, clock_timestamp(), b.skew_s, case when $4 then clock_timestamp() end, b.trouble
  from unnest($1::text[], $2::text[], $3::float8[], $5::text[]) b(node_id, link_id, skew_s, trouble)
  join fleet.links l on l.node_id = b.node_id and l.link_id = b.link_id
  join fleet.certificates c on c.serial = l.serial and c.revoked_at is null
 order by b.node_id
on conflict (node_id) do update set at = excluded.at, skew_s = excluded.skew_s, trouble = excluded.trouble,
       listed_at = coalesce(excluded.listed_at, h.listed_at),
       listed_before_at = case when $4 then h.listed_at else h.listed_before_at end
returning h.node_id, h.at
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A node's sign of life over a link. `trouble` is in the node's words."""

    node_id: str
    link_id: str
    skew_s: float = 0.0
    trouble: str = ""


async def beat(tx: Tx, beats: Sequence[Beat], *, listed: bool) -> dict[str, datetime]:
    """Many nodes at once. Only current links with good certificates count; these are returned. `listed` says that
    their units are known too, from here on."""
    rows = await tx.fetch(
        _BEAT,
        [beat.node_id for beat in beats],
        [beat.link_id for beat in beats],
        [beat.skew_s for beat in beats],
        listed,
        [beat.trouble for beat in beats],
    )
    return {row["node_id"]: row["at"] for row in rows}


@dataclass(frozen=True, slots=True)
class UnitRow:
    """A unit as its node reports it."""

    node_id: str
    unit_id: str
    state: str
    exit_code: int | None
    exit_class: str


#: How the units of these nodes were last heard of: in the list before, and whether the node was away or silent since.
_HEARD = """
    select h.node_id, coalesce(h.listed_before_at, h.at) as seen_at,
           coalesce(h.listed_before_at < greatest(l.connected_at, now() - interval '30 seconds'), false) as unheard
      from fleet.heartbeats h join fleet.links l using (node_id)
"""
_ABSENT = f"""
with old as (
    delete from fleet.unit_reports where node_id = any($1) and state = 'gone' and since < now() - interval '1 day'
)
update fleet.unit_reports u
   set state = 'gone', since = now(),
       seen_at = case when u.state = 'exited' then u.seen_at else h.seen_at end,
       unheard = case when u.state = 'exited' then u.unheard else h.unheard end
  from ({_HEARD}) h
 where u.node_id = any($1) and u.state <> 'gone' and h.node_id = u.node_id
   and not exists (select 1 from unnest($2::text[], $3::text[]) r(node_id, unit_id)
                    where r.node_id = u.node_id and r.unit_id = u.unit_id)
"""  # noqa: S608
_PRESENT = f"""
insert into fleet.unit_reports as u (node_id, unit_id, state, exit_code, exit_class, seen_at, unheard)
select r.*, case when r.state = 'exited' then h.seen_at end, r.state = 'exited' and h.unheard
  from unnest($1::text[], $2::text[], $3::text[], $4::int[], $5::text[])
       r (node_id, unit_id, state, exit_code, exit_class)
  join ({_HEARD}) h using (node_id)
on conflict (node_id, unit_id) do update
   set state = excluded.state, exit_code = excluded.exit_code, exit_class = excluded.exit_class, since = now(),
       seen_at = excluded.seen_at, unheard = excluded.unheard
 where (u.state, u.exit_code, u.exit_class) is distinct from (excluded.state, excluded.exit_code, excluded.exit_class)
"""  # noqa: S608


async def replace_units(tx: Tx, node_ids: Sequence[str], units: Sequence[UnitRow]) -> None:
    """These are all units of these nodes."""
    nodes, ids = [unit.node_id for unit in units], [unit.unit_id for unit in units]
    await tx.execute(_ABSENT, list(node_ids), nodes, ids)
    await tx.execute(
        _PRESENT,
        nodes,
        ids,
        [unit.state for unit in units],
        [unit.exit_code for unit in units],
        [unit.exit_class for unit in units],
    )


async def add_unit(tx: Tx, node_id: str, unit_id: str) -> None:
    """The node has just started it, and will name it with its next list."""
    await tx.execute(
        "insert into fleet.unit_reports (node_id, unit_id, state, exit_class) values ($1, $2, 'running', '')"
        " on conflict (node_id, unit_id) do nothing",
        node_id,
        unit_id,
    )


#: A pause that is longer means that nobody listened.
_LISTEN_GAP_S: Final = 10.0
_LISTEN = """
insert into fleet.listening as l (since, at) values (clock_timestamp(), clock_timestamp())
on conflict (only_row) do update set at = excluded.at,
       since = case when l.at < excluded.at - make_interval(secs => $1) then excluded.at else l.since end
 where l.at < excluded.at - interval '1 second'
"""
_LISTENED = """
select exists (select 1 from fleet.listening
                where since < clock_timestamp() - make_interval(secs => $1)
                  and at > clock_timestamp() - make_interval(secs => $2))
"""


async def listen(conn: Reader) -> None:
    """A gateway hears nodes now."""
    await conn.execute(_LISTEN, _LISTEN_GAP_S)


async def listened(conn: Reader, *, for_s: float) -> bool:
    """Whether some gateway could hear nodes all this time."""
    return await conn.fetchval(_LISTENED, for_s, _LISTEN_GAP_S)

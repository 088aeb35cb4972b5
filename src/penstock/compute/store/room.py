"""Where there is room: free slots counted by rack, and the slots of the node that fits best.

Placement reads the views that the fleet publishes and never locks the fleet's rows: heartbeats write them all the time.
A rack has few numbers where a fleet has ten thousand slots; only the slots of the one chosen node are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.compute.model import ANY_MODEL, Sku
from penstock.compute.topology import Seat, choose
from penstock.kit.db import Reader
from penstock.wire.tasks import GpuKind

#: What a SKU asks of a slot: kind, model, MIG profile, memory; and whether its node must serve functions.
_FITS: Final = f"""
    {{0}}.kind = $1 and ($2 = '{ANY_MODEL}' or {{0}}.gpu_model = $2) and ($1 <> '{GpuKind.MIG}' or {{0}}.profile = $3)
    and ($1 <> '{GpuKind.MPS}' or {{0}}.memory_bytes >= $4) and (not $5 or {{0}}.serves_functions)"""
#: Free slots by rack. A GPU with MPS shares is open to the project that holds some of them, or to all when none are
#: held and each was proved clean.
_ROOM: Final = f"""
    held as (
        select rack_id, count(*) as n from compute.claims where released_at is null and {{held}} group by rack_id
    ),
    ill as (
        select u.rack_id, sum((c.slot_id is not null)::int - u.present::int) as n, bool_or(u.blocked) as blocked
        from fleet.unhealthy_slots u
        left join compute.claims c on c.slot_id = u.slot_id and c.released_at is null group by u.rack_id
    ),
    room as (
        select r.rack_id, r.node_id, r.kind, r.gpu_model, r.profile, r.parent_uuid, r.memory_bytes, r.linked, r.fresh,
            (r.slots - coalesce(held.n, 0) + coalesce(ill.n, 0))::int as free
        from fleet.placeable_racks r
        left join held on held.rack_id = r.rack_id
        left join ill on ill.rack_id = r.rack_id
        where {{racks}} and (r.kind <> '{GpuKind.MPS}' or not coalesce(ill.blocked, false) and not exists (
            select 1 from compute.claims c where c.kind = '{GpuKind.MPS}' and c.rack_id = r.rack_id
                and c.released_at is null and c.project_id <> {{project}}))
    )"""  # noqa: S608
_OF_SKU: Final = _ROOM.format(held="kind = $1", racks=_FITS.format("r"), project="$6")
#: The tightest GPU for shares, else the tightest node, of those heard of just now if there are any. All shares of a
#: unit by MPS are on one GPU. With $9 only nodes whose link stands count.
_BEST_FIT: Final = f"""
    with {_OF_SKU},
    node as (
        select node_id from room where free > 0 and node_id <> all($8) and (linked or not $9) group by node_id
        having case when $1 = '{GpuKind.MPS}' then max(free) else sum(free) end >= $7
        order by bool_or(fresh) desc nulls last,
            case when $1 = '{GpuKind.WHOLE}' then null else min(free) filter (where free >= $7) end,
            sum(free), random() limit 1
    )
    select s.slot_id, s.node_id, s.gpu_uuid, s.gpu_index, s.simulated, s.kind, s.whole_uuid, s.rack_id, s.numa_node,
        s.nvlink_domain
    from fleet.placeable_slots s join room using (rack_id)
    where s.node_id = (select node_id from node)
        and not exists (select 1 from compute.claims c where c.slot_id = s.slot_id and c.released_at is null)
"""  # noqa: S608


def _asked(offer: Sku, *, serves: bool) -> tuple[str, str, str, int, bool]:
    return offer.share.value, offer.gpu_model, offer.mig_profile, offer.share_memory_bytes_min, serves


async def best_fit(
    conn: Reader,
    offer: Sku,
    gpus: int,
    *,
    project_id: str,
    serves: bool = False,
    not_on: Sequence[str] = (),
) -> Sequence[Seat]:
    """Free slots of the node with the fewest free that still fit, near one another; none when no node fits.

    With `serves`, only nodes that serve functions count. A node whose slots turn out to be fewer than were counted (its
    GPUs changed under a claim) is passed over. With `not_on`, only other nodes count, and only those whose link stands.
    """
    passed_over = list(not_on)
    asked = *_asked(offer, serves=serves), project_id, gpus
    while free := await _free_on_best_node(conn, asked, passed_over, linked=bool(not_on)):
        chosen = choose(free, gpus)
        if len(chosen) == gpus:
            return chosen
        passed_over.append(free[0].node_id)
    return []


async def _free_on_best_node(
    conn: Reader, asked: Sequence[object], passed_over: list[str], *, linked: bool
) -> Sequence[Seat]:
    rows = await conn.fetch(_BEST_FIT, *asked, passed_over, linked)
    return [Seat(**dict(row)) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Why a shape does or does not fit: what is free in all and in one place, which is a node, or a GPU for MPS.
    `with_blocked` adds to a place what is unclaimed there and out of service for now."""

    free: int
    free_in_one_place: int
    with_blocked: int


_CAPACITY: Final = f"""
    with {_OF_SKU},
    free as (
        select case when kind = '{GpuKind.MPS}' then parent_uuid else node_id end as place, sum(free) as n
        from room group by 1
    ),
    blocked as (
        select case when u.kind = '{GpuKind.MPS}' then u.whole_uuid else u.node_id end as place, count(*) as n
        from fleet.unplaceable_slots u
        where {_FITS.format("u")}
            and not exists (select 1 from compute.claims c where c.slot_id = u.slot_id and c.released_at is null)
        group by 1
    )
    select coalesce(sum(free.n), 0)::int as free, coalesce(max(free.n), 0)::int as free_in_one_place,
        coalesce(max(coalesce(free.n, 0) + blocked.n), 0)::int as with_blocked
    from free full join blocked using (place)
"""  # noqa: S608


async def capacity(conn: Reader, offer: Sku, *, project_id: str, serves: bool = False) -> Capacity:
    """What there is for this SKU and project; with `serves`, on nodes that serve functions."""
    row = await conn.fetchrow(_CAPACITY, *_asked(offer, serves=serves), project_id)
    assert row is not None
    return Capacity(**dict(row))


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """Free slots of one sort."""

    kind: GpuKind
    gpu_model: str
    profile: str
    memory_bytes: int
    free: int

    def serves(self, offer: Sku) -> bool:
        """Whether the SKU takes them."""
        if self.kind is not offer.share or offer.gpu_model not in (ANY_MODEL, self.gpu_model):
            return False
        if self.kind is GpuKind.MIG:
            return self.profile == offer.mig_profile
        return self.kind is GpuKind.WHOLE or self.memory_bytes >= offer.share_memory_bytes_min


async def by_sort(conn: Reader, *, project_id: str) -> Sequence[Free]:
    """All free slots that this project may get, counted by sort."""
    rows = await conn.fetch(
        f"""
        with {_ROOM.format(held="true", racks="true", project="$1")}
        select kind, gpu_model, profile, memory_bytes, sum(free)::int as free from room group by 1, 2, 3, 4
        """,  # noqa: S608
        project_id,
    )
    return [
        Free(
            kind=GpuKind(row["kind"]),
            gpu_model=row["gpu_model"],
            profile=row["profile"],
            memory_bytes=row["memory_bytes"],
            free=row["free"],
        )
        for row in rows
    ]

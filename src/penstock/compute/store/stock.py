"""Warm stock: its floors, what there is of it, and how it makes room.

Rows of stock are picked with `for update skip locked`, so that nobody waits; only who would otherwise be refused waits
for the others (`lock_all`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.compute.model import ANY_MODEL, Claim, Floor, Shape, Sku
from penstock.compute.store.handoffs import HANDED, PROMISED
from penstock.kit.db import Reader, Row, Tx

#: So many stock units are looked at when somebody needs their slots.
RECLAIM_MAX: Final = 256

_SLOT: Final = ", ".join(Claim.__dataclass_fields__)
_SHAPE: Final = "{0}.sku = $1 and {0}.gpus = $2 and {0}.image = $3"
#: On a node that takes work, with GPUs that are well.
_USABLE: Final = """not exists (
    select 1 from compute.claims c where c.allocation_id = a.id and c.released_at is null
        and not exists (select 1 from fleet.placeable_slots p where p.slot_id = c.slot_id))"""
_LIVING: Final = "a.purpose = 'stock' and a.ended_at is null and a.state in ('requested', 'provisioning', 'active')"


def _args(shape: Shape) -> tuple[str, int, str]:
    return shape.sku, shape.gpus, shape.image


def _floor(row: Row) -> Floor:
    shape = Shape(sku=row["sku"], gpus=row["gpus"], image=row["image"])
    return Floor(shape=shape, floor=row["floor"], reason=row["reason"])


async def put_floor(tx: Tx, shape: Shape, floor: int) -> None:
    """Set or change a floor."""
    await tx.execute(
        "insert into compute.stock_floors (sku, gpus, image, floor) values ($1, $2, $3, $4)"
        " on conflict (sku, gpus, image) do update set floor = excluded.floor, updated_at = clock_timestamp()",
        *_args(shape),
        floor,
    )


async def remove_floor(tx: Tx, shape: Shape) -> bool:
    """Forget a floor; whether there was one."""
    return (
        await tx.fetchval(
            f"delete from compute.stock_floors f where {_SHAPE.format('f')} returning true",  # noqa: S608
            *_args(shape),
        )
        is True
    )


async def shapes(conn: Reader) -> Sequence[Shape]:
    """All shapes that have a floor."""
    rows = await conn.fetch("select sku, gpus, image from compute.stock_floors order by sku, gpus, image")
    return [Shape(**dict(row)) for row in rows]


async def take_floor(tx: Tx, shape: Shape) -> Floor | None:
    """A floor, locked; none when it is gone or another keeper is at it."""
    row = await tx.fetchrow(
        "select sku, gpus, image, floor, reason from compute.stock_floors f"  # noqa: S608
        f" where {_SHAPE.format('f')} for update skip locked",
        *_args(shape),
    )
    return _floor(row) if row else None


async def explain(tx: Tx, shape: Shape, reason: str) -> None:
    """Say why there is less stock than there should be."""
    await tx.execute(
        f"update compute.stock_floors f set reason = $4 where {_SHAPE.format('f')} and reason <> $4",  # noqa: S608
        *_args(shape),
        reason,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """What there is of a shape. `failures` counts the starts that failed since one went well; the next should wait
    for `pause_s`."""

    ready: int
    starting: int
    failures: int
    failure: str
    pause_s: float


async def census(conn: Reader, shape: Shape, *, pause_max_s: float) -> Census:
    """Count, and see how the last starts went. A unit that ended by itself within a minute is a failed start; later it
    went with its host, and with all others there: that is no reason to wait."""
    row = await conn.fetchrow(
        f"""
        with recent as (
            select a.*, {_USABLE} as usable,
                a.state = 'failed' or a.reason like 'the unit %' and a.changed_at - a.active_at < interval '1 minute'
                    and a.state in ('releasing', 'released', 'release_failed') as broke
            from compute.allocations a where a.purpose = 'stock' and {_SHAPE.format("a")}
                and (a.ended_at is null or a.ended_at > clock_timestamp() - interval '1 hour')
        ), well as (
            select coalesce(max(active_at), '-infinity') as at from recent
            where state = 'active' or state = 'released' and reason like '{HANDED}%'
        ), counted as (
            select count(*) filter (where state = 'active' and usable)::int as ready,
                count(*) filter (where state in ('requested', 'provisioning') and failing = '')::int as starting,
                count(*) filter (where broke and changed_at > well.at)::int as failures,
                max(changed_at) filter (where broke and changed_at > well.at) as failed_at,
                coalesce((array_agg(reason order by changed_at desc) filter (where broke))[1], '') as failure
            from recent, well
        )
        select ready, starting, failures, failure, greatest(0, coalesce(extract(epoch from failed_at
            + make_interval(secs => least($4::float8, 2.0 ^ least(failures, 30))) - clock_timestamp()), 0))::float8
            as pause_s from counted
        """,  # noqa: S608
        *_args(shape),
        pause_max_s,
    )
    assert row is not None
    return Census(**dict(row))


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A floor beside what there is, for operators."""

    floor: Floor
    ready: int
    starting: int
    handed_over: int


async def standings(
    conn: Reader, *, only: Shape | None = None, after: Shape | None = None, limit: int = 1
) -> Sequence[Standing]:
    """The floors by shape, with their stock and how much of it was handed over within the last hour."""
    rows = await conn.fetch(
        f"""
        select f.sku, f.gpus, f.image, f.floor, f.reason, now.ready, now.starting, (
            select count(*)::int from compute.allocations h where h.stock_id is not null and h.sku = f.sku
                and h.gpus = f.gpus and h.image = f.image and h.created_at > clock_timestamp() - interval '1 hour'
        ) as handed_over
        from compute.stock_floors f cross join lateral (
            select count(*) filter (where a.state = 'active' and {_USABLE})::int as ready,
                count(*) filter (where a.state in ('requested', 'provisioning'))::int as starting
            from compute.allocations a where a.purpose = 'stock' and a.ended_at is null
                and a.sku = f.sku and a.gpus = f.gpus and a.image = f.image
        ) now
        where ($1::text is null or (f.sku, f.gpus, f.image) > ($1, $2, $3))
            and ($4::text is null or (f.sku, f.gpus, f.image) = ($4, $5, $6))
        order by f.sku, f.gpus, f.image limit $7
        """,  # noqa: S608
        *(_args(after) if after else (None, None, None)),
        *(_args(only) if only else (None, None, None)),
        limit,
    )
    return [
        Standing(floor=_floor(row), ready=row["ready"], starting=row["starting"], handed_over=row["handed_over"])
        for row in rows
    ]


async def unfit(tx: Tx, shape: Shape, offer: Sku) -> Sequence[str]:
    """Stock of this shape that nobody can get: made for other limits of the offer, or on GPUs or nodes that take no
    more work. What is on a node that does not answer is left alone: it may come back."""
    return await _ids(
        tx,
        f"""
        select a.id from compute.allocations a where {_LIVING} and {_SHAPE.format("a")}
            and (a.memory_bytes <> $4 or a.cpus <> $5 or a.processes_max <> $6 or a.scratch_bytes <> $7
                or not {PROMISED.format(share="$8", model="$9", profile="$10", purpose="a.purpose")})
            and not exists (
                select 1 from compute.claims c join fleet.unplaceable_slots u on u.slot_id = c.slot_id
                where c.allocation_id = a.id and c.released_at is null and u.node_state = 'unreachable')
        order by a.id for update of a skip locked
        """,  # noqa: S608
        *_args(shape),
        offer.memory_bytes_per_gpu * shape.gpus,
        offer.cpus_per_gpu * shape.gpus,
        offer.processes_max,
        offer.scratch_bytes,
        offer.share,
        offer.gpu_model,
        offer.mig_profile,
    )


async def surplus(tx: Tx, shape: Shape, count: int) -> Sequence[str]:
    """So many units of a shape that can go: first those that are not ready, then the newest."""
    return await _ids(
        tx,
        f"""
        select a.id from compute.allocations a where {_LIVING} and {_SHAPE.format("a")} and a.failing = ''
        order by a.state = 'active', a.id desc limit $4 for update of a skip locked
        """,  # noqa: S608
        *_args(shape),
        count,
    )


async def strays(tx: Tx, limit: int) -> Sequence[str]:
    """Stock of shapes that no longer have a floor."""
    return await _ids(
        tx,
        f"""
        select a.id from compute.allocations a where {_LIVING} and not exists (
            select 1 from compute.stock_floors f where f.sku = a.sku and f.gpus = a.gpus and f.image = a.image)
        order by a.id limit $1 for update of a skip locked
        """,  # noqa: S608
        limit,
    )


async def _ids(tx: Tx, query: str, *args: object) -> Sequence[str]:
    return [row["id"] for row in await tx.fetch(query, *args)]


async def tenants_wait(conn: Reader, offer: Sku) -> bool:
    """Whether somebody waits for GPUs that stock of this offer would take."""
    return await conn.fetchval(
        f"""
        select exists (
            select 1 from compute.allocations a join compute.skus s on s.name = a.sku
            where a.state = 'requested' and a.node_id is null and s.share = $2
                and ($1 in ('{ANY_MODEL}', s.gpu_model) or s.gpu_model = '{ANY_MODEL}'))
        """,  # noqa: S608
        offer.gpu_model,
        offer.share,
    )


async def lock_all(tx: Tx) -> Sequence[str]:
    """All stock that could make room or is on its way out for nobody in particular, locked. Waits for whoever is taking
    some of it; in the order of their ids, so that two who do this cannot wait for one another."""
    return await _ids(
        tx,
        "select a.id from compute.allocations a where a.purpose = 'stock' and a.ended_at is null"
        " and a.state <> 'release_failed' and a.yields_to is null order by a.id limit $1 for update of a",
        RECLAIM_MAX,
    )


async def slots_of(conn: Reader, allocation_ids: Sequence[str]) -> dict[str, str]:
    """Slot → the one of these allocations that holds it."""
    rows = await conn.fetch(
        "select slot_id, allocation_id from compute.claims where allocation_id = any($1) and released_at is null",
        allocation_ids,
    )
    return {row["slot_id"]: row["allocation_id"] for row in rows}


async def let_go(tx: Tx, allocation_ids: Sequence[str]) -> None:
    """Free what these allocations hold."""
    await tx.execute(
        "update compute.claims set released_at = clock_timestamp()"
        " where allocation_id = any($1) and released_at is null",
        allocation_ids,
    )


async def yield_to(tx: Tx, stock_id: str, allocation_id: str) -> None:
    """Note for whom a stock unit is released."""
    await tx.execute("update compute.allocations set yields_to = $2 where id = $1", stock_id, allocation_id)


async def pass_on(tx: Tx, stock_id: str, allocation_id: str, count: int) -> int:
    """Give up to `count` slots of released stock, proved clean, to the request that it yields to; how many it was."""
    rows = await tx.fetch(
        f"""
        with freed as (
            update compute.claims set released_at = clock_timestamp() where id in (
                select c.id from compute.claims c join fleet.placeable_slots p on p.slot_id = c.slot_id
                where c.allocation_id = $1 and c.released_at is null order by c.gpu_index limit $3)
            returning {_SLOT}
        )
        insert into compute.claims (allocation_id, project_id, {_SLOT})
        select $2, (select project_id from compute.allocations where id = $2), {_SLOT} from freed
        order by slot_id returning id
        """,  # noqa: S608
        stock_id,
        allocation_id,
        count,
    )
    return len(rows)

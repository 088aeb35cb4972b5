"""Placement: whole GPUs and shares apart, packed, near one another, and MPS GPUs for one project at a time."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from integration.compute.stage import World, someone, whole
from penstock.compute.errors import OutOfCapacity, Unhealthy
from penstock.compute.model import Allocation, Purpose, Sku
from penstock.compute.service import catalogue as offers
from penstock.compute.store import catalogue, room
from penstock.compute.topology import Seat
from penstock.fleet.store import slots
from penstock.kit import db as kit_db
from penstock.kit.db import Database, Tx
from penstock.kit.errors import Invalid
from penstock.node import layout
from penstock.wire.rest import SkuPut
from penstock.wire.tasks import Gpu, GpuKind


def shares(index: int, text: str, *, node: str = "n", model: str = "sim-1") -> list[Gpu]:
    """A GPU that is split like this."""
    gpu = whole(f"GPU-{node}-{index}", index, model=model)
    wanted = layout.parse(text).of(index)
    assert wanted is not None
    if wanted.kind is GpuKind.MPS:
        return layout.mps_shares(gpu, wanted.shares)
    return [
        layout.share(gpu, f"mig-{n}", GpuKind.MIG, memory_bytes=layout.gigabytes(name) << 30, profile=name)
        for n, name in enumerate(wanted.profiles)
    ]


def sku(name: str, share: GpuKind, *, counts: Sequence[int] = (1, 2, 3, 4), **more: object) -> Sku:
    return Sku(
        **{
            "name": name,
            "description": "",
            "gpu_model": "*",
            "gpu_counts": tuple(counts),
            "price_microusd_per_gpu_hour": 1,
            "memory_bytes_per_gpu": 1 << 30,
            "cpus_per_gpu": 1,
            "processes_max": 64,
            "scratch_bytes": 1 << 30,
            "enabled": True,
            "share": share,
            **more,
        }  # pyright: ignore[reportArgumentType]
    )


@pytest.fixture
async def market(world: World) -> World:
    """A world with SKUs of shares."""
    async with world.db.transaction() as tx:
        await catalogue.put_sku(tx, sku("mig.1", GpuKind.MIG, mig_profile="1g.10gb"))
        await catalogue.put_sku(tx, sku("mig.2", GpuKind.MIG, mig_profile="2g.20gb"))
        await catalogue.put_sku(tx, sku("mps", GpuKind.MPS))
        await catalogue.put_sku(tx, sku("mps.30", GpuKind.MPS, share_memory_bytes_min=30 << 30))
    return world


def unheard(_: str, __: bytes) -> None:
    """Hints go nowhere."""


async def gpus_of(world: World, made: Allocation) -> list[str]:
    """The GPUs that an allocation is on, one for each of its places."""
    async with world.db.read() as conn:
        rows = await conn.fetch("select whole_uuid from compute.claims where allocation_id = $1", made.id)
    return sorted(row["whole_uuid"] for row in rows)


async def test_whole_gpus_and_shares_are_never_taken_for_one_another(market: World) -> None:
    await market.add_node(listing=[whole("GPU-w", 0), *shares(1, "mps:2"), *shares(2, "mig:1g.10gb")])
    with pytest.raises(OutOfCapacity, match="1 free"):
        await market.create(gpus=2)
    assert await gpus_of(market, await market.create()) == ["GPU-w"]
    assert await gpus_of(market, await market.create(sku="mig.1")) == ["GPU-n-2"]
    assert await gpus_of(market, await market.create(sku="mps", gpus=2)) == ["GPU-n-1", "GPU-n-1"]
    for name in ("g1.1", "mig.1", "mps"):
        with pytest.raises(OutOfCapacity, match="0 free"):
            await market.create(sku=name)


async def test_a_mig_share_has_the_profile_that_was_asked_for(market: World) -> None:
    await market.add_node(listing=[*shares(0, "mig:1g.10gb,1g.10gb,2g.20gb"), *shares(1, "mig:1g.10gb")])
    made = await market.create(sku="mig.2")
    assert (await market.row(made.id)).node_id is not None
    with pytest.raises(OutOfCapacity, match=r"1 MIG share 2g\.20gb of SKU mig\.2 asked for, 0 free"):
        await market.create(sku="mig.2")


async def test_shares_are_packed_onto_the_fullest_gpu_and_node(market: World) -> None:
    await market.add_node(listing=[*shares(0, "mig:1g.10gb,1g.10gb,1g.10gb"), *shares(1, "mig:1g.10gb,1g.10gb")])
    await market.add_node(listing=[*shares(0, "mig:1g.10gb,1g.10gb", node="m")])
    # Two GPUs fit two tightly; the one on the fuller node is taken.
    assert await gpus_of(market, await market.create(sku="mig.1", gpus=2)) == ["GPU-m-0"] * 2
    assert await gpus_of(market, await market.create(sku="mig.1")) == ["GPU-n-1"]
    assert await gpus_of(market, await market.create(sku="mig.1")) == ["GPU-n-1"]
    assert await gpus_of(market, await market.create(sku="mig.1", gpus=3)) == ["GPU-n-0"] * 3


async def test_mig_shares_of_one_allocation_may_be_on_two_gpus_but_not_on_two_nodes(market: World) -> None:
    await market.add_node(listing=[*shares(0, "mig:1g.10gb,1g.10gb"), *shares(1, "mig:1g.10gb")])
    await market.add_node(listing=shares(0, "mig:1g.10gb", node="m"))
    assert await gpus_of(market, await market.create(sku="mig.1", gpus=3)) == ["GPU-n-0", "GPU-n-0", "GPU-n-1"]


async def test_an_mps_share_is_as_large_as_the_sku_says(market: World) -> None:
    await market.add_node(listing=[*shares(0, "mps:4"), *shares(1, "mps:2")])
    assert await gpus_of(market, await market.create(sku="mps.30")) == ["GPU-n-1"]


async def test_the_mps_shares_of_a_gpu_are_one_projects_at_a_time(market: World) -> None:
    await market.add_node(listing=[*shares(0, "mps:4"), *shares(1, "mps:4")])
    ours, theirs = someone("prj_ours"), someone("prj_theirs")
    first = await market.create(ours, sku="mps")
    beside = await market.create(ours, sku="mps", gpus=2)
    other = await market.create(theirs, sku="mps")
    assert set(await gpus_of(market, first)) == set(await gpus_of(market, beside)) != set(await gpus_of(market, other))
    with pytest.raises(OutOfCapacity, match="0 free for this project"):
        await market.create(someone("prj_third"), sku="mps")
    with pytest.raises(OutOfCapacity, match="3 free for this project"):
        await market.create(theirs, sku="mps", gpus=4)


async def test_an_mps_gpu_with_a_share_that_is_not_proved_clean_gets_no_new_tenant(market: World) -> None:
    await market.add_node(listing=shares(0, "mps:4"))
    async with market.db.transaction() as tx:
        await tx.execute("update fleet.slots set blocked = true where gpu_uuid like '%/mps-0'")
    with pytest.raises((OutOfCapacity, Unhealthy)):
        await market.create(sku="mps")


@pytest.mark.parametrize("gpus", [1, 2])
async def test_64_racers_never_put_two_projects_on_one_mps_gpu(market: World, database_url: str, gpus: int) -> None:
    for index in range(2):
        await market.add_node(listing=[*shares(0, "mps:4", node=f"n{index}"), *shares(1, "mps:4", node=f"n{index}")])
    async with kit_db.connect(database_url, unheard, connections_max=32) as crowd:
        racers = World(crowd)
        results = await asyncio.gather(
            *(racers.create(someone(f"prj_{n % 8}"), sku="mps", gpus=gpus) for n in range(64)), return_exceptions=True
        )
    assert all(isinstance(result, Allocation | OutOfCapacity) for result in results), results
    async with market.db.read() as conn:
        rows = await conn.fetch("select whole_uuid, slot_id, project_id from compute.claims where released_at is null")
    owners: dict[str, set[str]] = {}
    for row in rows:
        owners.setdefault(row["whole_uuid"], set()).add(row["project_id"])
    assert len(owners) == 4
    assert all(len(projects) == 1 for projects in owners.values())
    assert len({row["slot_id"] for row in rows}) == len(rows) == 16


async def test_two_projects_on_one_mps_gpu_are_impossible(market: World, database: Database) -> None:
    await market.add_node(listing=shares(0, "mps:2"))
    await market.create(sku="mps")
    with pytest.raises(Exception, match="claims_one_project"):
        async with database.transaction() as tx:
            await tx.execute(
                "insert into compute.claims (slot_id, allocation_id, node_id, gpu_uuid, gpu_index, simulated,"
                " project_id, kind, whole_uuid, rack_id) select 'slt_x', allocation_id, node_id, 'x', 0, true,"
                " 'prj_other', kind, whole_uuid, rack_id from compute.claims"
            )


async def test_a_gpu_that_is_split_anew_has_its_new_places_only(market: World) -> None:
    node_id = await market.add_node(listing=[*shares(0, "mps:4"), whole("GPU-w", 1)])
    async with market.db.transaction() as tx:
        await slots.replace(tx, node_id, shares(0, "mig:2g.20gb"), simulated=True)
        found = {slot.gpu_uuid: slot.health.value for slot in await slots.of_nodes(tx, [node_id])}
    assert found == {"GPU-n-0/mig-0": "healthy", "GPU-w": "missing"}
    async with market.db.read() as conn:
        sorts = await room.by_sort(conn, project_id="prj_default")
    assert {(sort.kind, sort.free) for sort in sorts if sort.free} == {(GpuKind.MIG, 1)}


async def test_gpus_of_one_nvlink_domain_are_kept_together(world: World) -> None:
    await world.add_node(listing=[whole(f"GPU-{n}", n, numa=n % 2, nvlink="ab"[n // 4]) for n in range(8)])
    for _ in range(2):
        assert await gpus_of(world, await world.create(gpus=4)) in (
            [f"GPU-{n}" for n in range(4)],
            [f"GPU-{n}" for n in range(4, 8)],
        )


async def test_a_sku_of_shares_shows_what_is_free_of_it(market: World) -> None:
    await market.add_node(listing=[*shares(0, "mps:4"), *shares(1, "mig:1g.10gb,2g.20gb"), whole("GPU-w", 2)])
    await market.create(someone("prj_other"), sku="mps")
    async with market.db.read() as conn:
        shown = {each.sku.name: each.gpus_free for each in await offers.offers(conn, someone(), after="", limit=10)}
    assert shown == {"g1.1": 1, "mig.1": 1, "mig.2": 1, "mps": 0, "mps.30": 0}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"share": "mig"}, "mig_profile"),
        ({"share": "mps", "mig_profile": "1g.10gb"}, "mig_profile"),
        ({"share": "mig", "mig_profile": "large"}, "mig_profile"),
        ({"share_memory_bytes_min": 1}, "share_memory_bytes_min"),
    ],
)
async def test_a_sku_whose_share_makes_no_sense_is_refused(world: World, change: dict[str, object], field: str) -> None:
    body = SkuPut(
        **{
            "description": "",
            "gpu_model": "*",
            "gpu_counts": [1],
            "price_microusd_per_gpu_hour": 1,
            "memory_bytes_per_gpu": 1 << 30,
            "cpus_per_gpu": 1,
        }
        | change  # pyright: ignore[reportArgumentType]
    )
    async with world.db.transaction() as tx:
        with pytest.raises(Invalid) as refused:
            await offers.put_offer(tx, someone(operator=True), "x", body)
    assert refused.value.field == field


@dataclass(frozen=True)
class Place:
    """A slot of the oracle's."""

    node: int
    gpu: int
    well: bool
    held_by: str


@st.composite
def fleets(draw: st.DrawFn) -> tuple[GpuKind, list[Place], int]:
    """Some nodes with some GPUs, all whole or all split, some of it ill or held; and a request."""
    kind = draw(st.sampled_from(list(GpuKind)))
    places: list[Place] = []
    for node in range(draw(st.integers(2, 4))):
        for gpu in range(draw(st.integers(1, 4))):
            owner = draw(st.sampled_from(["prj_me", "prj_other"]))
            for _ in range(1 if kind is GpuKind.WHOLE else draw(st.integers(1, 3))):
                condition = draw(st.sampled_from(["free", "free", "free", "free", "held", "ill", "held and ill"]))
                held_by = owner if condition.startswith("held") else ""
                places.append(Place(node, gpu, not condition.endswith("ill"), held_by))
    return kind, places, draw(st.integers(1, 3))


def oracle(kind: GpuKind, places: Sequence[Place], count: int) -> set[tuple[int, int | None]]:
    """Where the request may go: (node, GPU), or (node, None) where the GPU does not matter."""
    foreign = {(place.node, place.gpu) for place in places if place.held_by == "prj_other" and kind is GpuKind.MPS}
    free = Counter(
        (place.node, place.gpu)
        for place in places
        if place.well and not place.held_by and (place.node, place.gpu) not in foreign
    )
    nodes = Counter[int]()
    for (node, _), n in free.items():
        nodes[node] += n
    if kind is not GpuKind.WHOLE and (fitting := {gpu: n for gpu, n in free.items() if n >= count}):
        best = min((n, nodes[gpu[0]]) for gpu, n in fitting.items())
        return {gpu for gpu, n in fitting.items() if (n, nodes[gpu[0]]) == best}
    fit = {} if kind is GpuKind.MPS else {node: n for node, n in nodes.items() if n >= count}
    return {(node, None) for node, n in fit.items() if n == min(fit.values())}


class _Undo(Exception):
    """Ends an example and leaves nothing of it."""


async def build(tx: Tx, kind: GpuKind, places: Sequence[Place]) -> None:
    """The oracle's fleet as rows."""
    for node in sorted({place.node for place in places}):
        await tx.execute(
            "insert into fleet.nodes (id, name, state, gpus_approved) values ($1, $1, 'ready', 8)", f"{node}"
        )
        own = [(number, place) for number, place in enumerate(places) if place.node == node]
        await slots.replace(tx, f"{node}", [_gpu(kind, number, place) for number, place in own], simulated=True)
        ill = [f"{number}" for number, place in own if not place.well]
        await tx.execute("update fleet.slots set quarantined = true where gpu_uuid = any($1)", ill)
        for project in ("prj_me", "prj_other"):
            await tx.execute(
                "insert into compute.claims (slot_id, allocation_id, node_id, gpu_uuid, gpu_index, simulated,"
                " project_id, kind, whole_uuid, rack_id) select id, 'alc', node_id, gpu_uuid, gpu_index, true, $2,"
                " kind, whole_uuid, rack_id from fleet.slots where gpu_uuid = any($1)",
                [f"{number}" for number, place in own if place.held_by == project],
                project,
            )


def _gpu(kind: GpuKind, number: int, place: Place) -> Gpu:
    part = kind is not GpuKind.WHOLE
    return Gpu(
        uuid=f"{number}",
        index=place.gpu,
        model="sim-1",
        memory_bytes=1 << 30,
        kind=kind,
        parent_uuid=f"{place.node}:{place.gpu}" if part else "",
        profile="1g.10gb" if kind is GpuKind.MIG else "",
    )


@given(fleet=fleets())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_placement_agrees_with_an_oracle(world: World, fleet: tuple[GpuKind, list[Place], int]) -> None:
    kind, places, count = fleet
    offer = sku("asked", kind, mig_profile="1g.10gb" if kind is GpuKind.MIG else "")
    found: Sequence[Seat] = ()
    with contextlib.suppress(_Undo):
        async with world.db.transaction() as tx:
            await build(tx, kind, places)
            found = await room.best_fit(tx, offer, count, project_id="prj_me")
            raise _Undo
    expected = oracle(kind, places, count)
    assert (len(found), bool(found)) == (count if expected else 0, bool(expected))
    if found:
        taken = [places[int(seat.gpu_uuid)] for seat in found]
        assert {place.node for place in taken} == {taken[0].node}
        gpus = {place.gpu for place in taken}
        assert any(taken[0].node == node and (gpu is None or gpus == {gpu}) for node, gpu in expected), expected


async def test_workers_of_functions_go_only_where_a_sidecar_is(world: World) -> None:
    await world.add_node(1)
    serving = await world.add_node(4, serves=True)
    made = await world.create(purpose=Purpose.FUNCTION_WORKER)
    assert made.node_id == serving
    assert (await world.create()).node_id != serving, "others go where they fit best"


async def test_a_refusal_says_that_free_nodes_serve_no_functions(world: World) -> None:
    await world.add_node(2)
    with pytest.raises(OutOfCapacity, match="0 free on nodes that serve functions; 2 more are on nodes that serve no"):
        await world.create(purpose=Purpose.FUNCTION_WORKER)
    await world.create()

"""Placement over ten thousand GPUs, half of them claimed: how long one create waits for its slots."""

import random
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.database import migrated
from bench.figures import Figure, bound, percentile
from penstock.compute.model import Draft, Purpose, Sku
from penstock.compute.service.place import Placed, place
from penstock.compute.store import catalogue
from penstock.fleet.store import slots
from penstock.kit.db import Database
from penstock.kit.ids import new_id
from penstock.wire.tasks import Gpu

NODES = 1250
GPUS_PER_NODE = 8
SAMPLES = 300
SIZES = (1, 1, 2, 4)


@asynccontextmanager
async def _fleet() -> AsyncIterator[Database]:
    async with migrated(command_timeout_s=30) as database:
        await _fill(database)
        yield database


async def _fill(database: Database) -> None:
    nodes = [new_id("nod") for _ in range(NODES)]
    async with database.transaction() as tx:
        await tx.executemany(
            "insert into fleet.nodes (id, name, state, gpus_approved) values ($1, $1, 'ready', 1024)",
            [(node,) for node in nodes],
        )
        for node in nodes:
            await slots.replace(tx, node, [_gpu(node, index) for index in range(GPUS_PER_NODE)], simulated=True)
        await tx.execute("alter table compute.claims drop constraint claims_allocation_id_fkey")
        await tx.execute(
            "insert into compute.claims (slot_id, allocation_id, node_id, gpu_uuid, gpu_index, simulated, project_id,"
            " kind, whole_uuid, rack_id) select slot_id, 'alc_' || slot_id, node_id, gpu_uuid, gpu_index, simulated,"
            " 'prj_other', kind, whole_uuid, rack_id from fleet.placeable_slots"
            " where ('x' || substr(md5(gpu_uuid), 1, 8))::bit(32)::bigint % 2 = 0"
        )
    async with database.read() as conn:
        await conn.execute("vacuum analyze")


def _gpu(node: str, index: int) -> Gpu:
    return Gpu(
        uuid=f"GPU-{node[4:]}-{index}",
        index=index,
        model="NVIDIA H100 80GB HBM3",
        memory_bytes=80 << 30,
        numa_node=index // 4,
        nvlink_domain=f"{node[4:]}-{index // 4}",
    )


def _draft(offer: Sku, gpus: int) -> Draft:
    return Draft(
        id=new_id("alc"),
        project_id="prj_default",
        organisation_id="org_default",
        name=None,
        purpose=Purpose.INTERACTIVE,
        key_id=None,
        sku=offer.name,
        gpus=gpus,
        image="python:3",
        labels={},
        env={},
        command=[],
        ports=[],
        secrets=[],
        egress=[],
        runtime="",
        unit_id="",
        stock_id=None,
        price_microusd_per_hour=0,
        memory_bytes=0,
        cpus=1,
        processes_max=1,
        scratch_bytes=0,
        wait_s=0,
        correlation_id="",
    )


async def _samples_ms(database: Database, offer: Sku) -> list[float]:
    """One request at a time, from the first question to the claims; then its transaction is committed."""
    samples: list[float] = []
    for _ in range(SAMPLES):
        draft = _draft(offer, random.choice(SIZES))
        async with database.transaction() as tx:
            began = time.perf_counter()
            found = await place(tx, draft, offer)
            samples.append((time.perf_counter() - began) * 1000)
        assert isinstance(found, Placed), found
    return samples


async def run() -> list[Figure]:
    """The middle one and the slow ones."""
    async with _fleet() as database:
        async with database.read() as conn:
            offer = await catalogue.sku(conn, "g1.1")
        assert offer is not None
        samples = await _samples_ms(database, offer)
    return [
        bound("placement.p50", statistics.median(samples), "ms", 10),
        bound("placement.p99", percentile(samples, 0.99), "ms", 50),
    ]

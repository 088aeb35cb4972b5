"""A small world for tests: nodes with slots, callers, and the use cases ready to call."""

from dataclasses import dataclass, field

from penstock.compute.model import Allocation, Deadlines, Limits
from penstock.compute.ports import NoSecrets, OpenFunds
from penstock.compute.service.create import Create
from penstock.compute.service.release import Release
from penstock.compute.store import allocations
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.kit.ids import new_id
from penstock.wire.rest import AllocationCreate

ACTIONS = frozenset(
    f"{thing}.{verb}"
    for thing, verbs in {
        "allocations": ("read", "create", "update", "release", "exec"),
        "skus": ("read", "write"),
        "quotas": ("read", "write"),
    }.items()
    for verb in verbs
)
LIMITS = Limits(deadlines=Deadlines(requested_s=30, provisioning_s=30, releasing_s=30))


def someone(project_id: str = "prj_default", *, actions: frozenset[str] = ACTIONS, operator: bool = False) -> Caller:
    """A caller with a project of their own."""
    return Caller(
        principal_id=new_id("usr"),
        principal_kind="user",
        display_name="someone",
        organisation_id="org_default",
        project_id=project_id,
        role="developer",
        actions=actions,
        operator=operator,
    )


@dataclass
class World:
    """Rows and use cases of one test."""

    db: Database
    limits: Limits = LIMITS
    slots: dict[str, list[str]] = field(default_factory=dict)

    async def add_node(self, gpus: int, *, state: str = "ready", model: str = "sim-1", health: str = "healthy") -> str:
        """A node with so many GPUs."""
        node_id = new_id("nod")
        async with self.db.transaction() as tx:
            await tx.execute(
                "insert into fleet.nodes (id, name, state, gpus_approved) values ($1, $2, $3, 1024)",
                node_id,
                node_id[4:],
                state,
            )
            await tx.execute("insert into fleet.heartbeats (node_id, at) values ($1, now())", node_id)
            for index in range(gpus):
                slot_id = new_id("slt")
                self.slots.setdefault(node_id, []).append(slot_id)
                await tx.execute(
                    "insert into fleet.slots (id, node_id, gpu_uuid, gpu_index, gpu_model, memory_bytes, pci_address,"
                    " numa_node, simulated, gpu_healthy, blocked) values ($1, $2, $3, $4, $5, 1, '', $6, true, $7, $8)",
                    slot_id,
                    node_id,
                    f"GPU-{slot_id[4:]}",
                    index,
                    model,
                    index // 4,
                    health != "quarantined",
                    health == "cleanup_blocked",
                )
        return node_id

    async def create(self, caller: Caller | None = None, **body: object) -> Allocation:
        """Ask for an allocation in a transaction of its own."""
        request = AllocationCreate(**{"sku": "g1.1"} | body)  # pyright: ignore[reportArgumentType]
        async with self.db.transaction() as tx:
            return await Create(OpenFunds(), NoSecrets(), self.limits)(tx, caller or someone(), request)

    async def release(self, allocation_id: str, caller: Caller | None = None, reason: str = "") -> Allocation:
        """Ask for its end."""
        async with self.db.transaction() as tx:
            return await Release(self.limits)(tx, caller or someone(), allocation_id, reason)

    async def row(self, allocation_id: str) -> Allocation:
        """Its row."""
        async with self.db.read() as conn:
            found = await allocations.find(conn, allocation_id)
        assert found is not None
        return found

    async def held(self) -> list[tuple[str, str]]:
        """(slot, allocation) of all claims that are held."""
        async with self.db.read() as conn:
            rows = await conn.fetch(
                "select slot_id, allocation_id from compute.claims where released_at is null order by id"
            )
        return [(row["slot_id"], row["allocation_id"]) for row in rows]

    async def facts(self, allocation_id: str) -> list[tuple[int, str]]:
        """(version, type) of its facts."""
        async with self.db.read() as conn:
            rows = await conn.fetch(
                "select version, type from kit.outbox where aggregate_id = $1 order by version", allocation_id
            )
        return [(row["version"], row["type"]) for row in rows]

    async def value(self, query: str, *args: object) -> object:
        """One value."""
        async with self.db.read() as conn:
            return await conn.fetchval(query, *args)

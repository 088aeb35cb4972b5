"""A small world for tests: nodes with slots, callers, and the use cases ready to call."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.compute.model import Allocation, Deadlines, Limits, Owner, Purpose
from penstock.compute.ports import Handoffs
from penstock.compute.service.create import Create
from penstock.compute.service.release import Release
from penstock.compute.service.stock import StockKeeper
from penstock.compute.store import allocations
from penstock.fleet.store import slots
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Tx
from penstock.kit.errors import Invalid
from penstock.kit.ids import new_id
from penstock.wire.rest import AllocationCreate, SecretUse
from penstock.wire.tasks import Gpu, SecretRef

ACTIONS = frozenset(
    f"{thing}.{verb}"
    for thing, verbs in {
        "allocations": ("read", "create", "update", "release", "exec"),
        "skus": ("read", "write"),
        "quotas": ("read", "write"),
        "runtimes": ("read", "write"),
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


def whole(uuid: str, index: int, *, model: str = "sim-1", numa: int | None = None, nvlink: str = "") -> Gpu:
    """A whole GPU."""
    node = index // 4 if numa is None else numa
    return Gpu(uuid=uuid, index=index, model=model, memory_bytes=80 << 30, numa_node=node, nvlink_domain=nvlink)


class OpenFunds:
    """Everyone can pay."""

    async def check(
        self, tx: Tx, *, organisation_id: str, project_id: str, key_id: str | None, price_microusd_per_hour: int
    ) -> None:
        """Say yes."""


class NoSecrets:
    """A project without any."""

    async def refer(self, tx: Tx, *, project_id: str, uses: Sequence[SecretUse]) -> Sequence[SecretRef]:
        """Refuse any that is asked for."""
        raise Invalid(f"there is no secret {uses[0].name}", field="secrets")


@dataclass
class Asked:
    """Notes which handoffs nodes would have been asked for."""

    allocations: list[Allocation] = field(default_factory=list)

    async def dispatch(self, tx: Tx, allocation: Allocation) -> str:
        """Only note it."""
        self.allocations.append(allocation)
        return new_id("tsk")


@dataclass
class World:
    """Rows and use cases of one test."""

    db: Database
    limits: Limits = LIMITS
    handoffs: Handoffs = field(default_factory=Asked)

    async def add_node(
        self,
        gpus: int = 0,
        *,
        state: str = "ready",
        model: str = "sim-1",
        health: str = "healthy",
        listing: Sequence[Gpu] = (),
        serves: bool = False,
    ) -> str:
        """A node with so many GPUs, four to a NUMA node, or with those of the listing."""
        node_id = new_id("nod")
        found = listing or [whole(f"GPU-{node_id[4:]}-{index}", index, model=model) for index in range(gpus)]
        async with self.db.transaction() as tx:
            await tx.execute(
                "insert into fleet.nodes (id, name, state, gpus_approved, serves_functions)"
                " values ($1, $2, $3, 1024, $4)",
                node_id,
                node_id[4:],
                state,
                serves,
            )
            await tx.execute("insert into fleet.heartbeats (node_id, at, listed_at) values ($1, now(), now())", node_id)
            await slots.replace(tx, node_id, found, simulated=True)
            await tx.execute(
                "update fleet.slots set quarantined = $2, blocked = $3 where node_id = $1",
                node_id,
                health == "quarantined",
                health == "cleanup_blocked",
            )
        return node_id

    async def grow(self, node_id: str, gpus: int) -> None:
        """The node of so many equal GPUs has more of them now."""
        found = [whole(f"GPU-{node_id[4:]}-{index}", index) for index in range(gpus)]
        async with self.db.transaction() as tx:
            await slots.replace(tx, node_id, found, simulated=True)

    async def create(
        self, caller: Caller | None = None, *, purpose: Purpose = Purpose.INTERACTIVE, **body: object
    ) -> Allocation:
        """Ask for an allocation in a transaction of its own."""
        request = AllocationCreate(**{"sku": "g1.1"} | body)  # pyright: ignore[reportArgumentType]
        async with self.db.transaction() as tx:
            create = Create(OpenFunds(), NoSecrets(), self.handoffs, self.limits)
            return await create(tx, caller or someone(), request, purpose=purpose)

    async def release(self, allocation_id: str, caller: Caller | None = None, reason: str = "") -> Allocation:
        """Ask for its end."""
        async with self.db.transaction() as tx:
            return await Release(self.limits)(tx, caller or someone(), allocation_id, reason)

    @property
    def keeper(self) -> StockKeeper:
        """Whoever keeps the stock."""
        owner = Owner(project_id="prj_platform", organisation_id="org_platform")
        return StockKeeper(self.db, owner, Release(self.limits), self.limits)

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

"""Secrets as allocations use them: compute says what is needed and whose it is; no project opens another's."""

from pathlib import Path

import pytest

from integration.compute.stage import OpenFunds, World, someone
from penstock.compute.model import Event
from penstock.compute.references import References
from penstock.compute.service.create import Create
from penstock.compute.store import allocations
from penstock.compute.store.allocations import Change
from penstock.compute.units import Units
from penstock.flows.unitsecrets import UnitSecrets
from penstock.kit.db import Database
from penstock.kit.errors import NotFound
from penstock.secrets import keyring
from penstock.secrets.errors import VersionGone
from penstock.secrets.keyring import Keyring
from penstock.secrets.service import Secrets
from penstock.wire.rest import AllocationCreate, SecretUse
from penstock.wire.tasks import SecretRef

ACTIONS = frozenset({"allocations.create", "secrets.write"})


@pytest.fixture
def world(database: Database) -> World:
    return World(database)


@pytest.fixture
def secrets(tmp_path: Path) -> Secrets:
    keyring.init(tmp_path / "keys")
    return Secrets(Keyring(tmp_path / "keys"))


async def test_an_allocation_holds_on_to_its_version_and_its_node_gets_that_value(
    world: World, secrets: Secrets
) -> None:
    await world.add_node(1)
    caller = someone("prj_a", actions=ACTIONS)
    request = AllocationCreate(sku="g1.1", secrets=[SecretUse(name="token", env="TOKEN")])
    async with world.db.transaction() as tx:
        await secrets.put(tx, caller, "token", b"one")
        await secrets.put(tx, someone("prj_b", actions=ACTIONS), "other", b"theirs")
        made = await Create(OpenFunds(), secrets, world.handoffs, world.limits)(tx, caller, request)
        await secrets.put(tx, caller, "token", b"two")
    assert made.secrets == [SecretRef(name="token", version=1, env="TOKEN")]
    given = UnitSecrets(Units(), secrets)
    async with world.db.transaction() as tx:
        assert await References().referred(tx, {"prj_a", "prj_b"}) == {("prj_a", "token", 1)}
        assert await References().referred(tx, {"prj_b"}) == set()
        values = await given.values(tx, node_id="nod_default", allocation_id=made.id, refs=made.secrets, serves=False)
        assert values == {"token": b"one"}
    foreign = [SecretRef(name="other", version=1)]
    with pytest.raises(VersionGone):
        async with world.db.transaction() as tx:
            await given.values(tx, node_id="nod_default", allocation_id=made.id, refs=foreign, serves=False)
    async with world.db.transaction() as tx:
        await allocations.move(tx, made, Event.DEADLINE, Change(reason="over", deadline_s=None))
    async with world.db.transaction() as tx:
        assert await References().referred(tx, {"prj_a"}) == set()
        with pytest.raises(NotFound):
            await given.values(tx, node_id="nod_default", allocation_id=made.id, refs=made.secrets, serves=False)

"""Secrets in the real database: versions, references, opening, rotation while readers read, and what is pruned."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.kit.audit import Actor
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Reader
from penstock.kit.errors import Denied, Invalid, NotFound
from penstock.secrets import keyring, service
from penstock.secrets.errors import KeyMissing, NotForEnv, SecretsTooBig, Tampered, UnknownSecret, VersionGone
from penstock.secrets.keyring import Keyring
from penstock.secrets.service import Secrets
from penstock.secrets.upkeep import Pruning, rewrap
from penstock.wire.rest import SecretUse
from penstock.wire.tasks import SecretRef

NODE = Actor(id="nod_default", kind="node")


def caller(project_id: str = "prj_default", *actions: str) -> Caller:
    return Caller(
        principal_id="usr_default",
        principal_kind="user",
        display_name="someone",
        organisation_id="org_default",
        project_id=project_id,
        role="developer",
        actions=frozenset(actions or ("secrets.read", "secrets.write")),
    )


@dataclass
class Stage:
    """The use cases on one database and one keyring."""

    db: Database
    folder: Path
    secrets: Secrets
    living: set[tuple[str, str, int]] = field(default_factory=set)

    async def put(self, name: str, value: bytes, project_id: str = "prj_default") -> int:
        async with self.db.transaction() as tx:
            return (await self.secrets.put(tx, caller(project_id), name, value)).version

    async def refer(self, *uses: SecretUse, project_id: str = "prj_default") -> list[SecretRef]:
        async with self.db.transaction() as tx:
            return list(await self.secrets.refer(tx, project_id=project_id, uses=uses))

    async def reveal(self, *refs: SecretRef, project_id: str = "prj_default") -> dict[str, bytes]:
        async with self.db.transaction() as tx:
            return await self.secrets.reveal(tx, NODE, project_id=project_id, refs=refs)

    async def referred(self, _: Reader, __: Collection[str]) -> set[tuple[str, str, int]]:
        return self.living

    async def prune(self, keep_s: float = 0) -> int:
        return await Pruning(self.db, self, keep_s=keep_s).sweep()


@pytest.fixture
def stage(database: Database, tmp_path: Path) -> Stage:
    keyring.init(tmp_path / "keys")
    return Stage(database, tmp_path / "keys", Secrets(Keyring(tmp_path / "keys")))


async def test_a_unit_gets_the_version_that_was_current_when_it_was_made(stage: Stage) -> None:
    assert await stage.put("token", b"one") == 1
    [ref] = await stage.refer(SecretUse(name="token", env="TOKEN"))
    assert ref == SecretRef(name="token", version=1, env="TOKEN")
    assert await stage.put("token", b"two") == 2
    [newer] = await stage.refer(SecretUse(name="token"))
    assert await stage.reveal(ref) == {"token": b"one"}
    assert await stage.reveal(newer) == {"token": b"two"}


async def test_every_opening_is_in_the_audit_log(stage: Stage) -> None:
    await stage.put("token", b"one")
    await stage.reveal(SecretRef(name="token", version=1))
    async with stage.db.read() as conn:
        row = await conn.fetchrow("select * from kit.audit where action = 'secrets.reveal'")
    assert row is not None
    assert (row["actor_id"], row["project_id"], row["detail"]) == (NODE.id, "prj_default", {"versions": {"token": 1}})


async def test_references_count_in_their_own_project_only(stage: Stage) -> None:
    await stage.put("token", b"one", "prj_a")
    with pytest.raises(UnknownSecret) as caught:
        await stage.refer(SecretUse(name="token"), project_id="prj_b")
    assert caught.value.field == "secrets"
    with pytest.raises(VersionGone):
        await stage.reveal(SecretRef(name="token", version=1), project_id="prj_b")


async def test_what_cannot_be_a_variable_is_refused_as_one(stage: Stage) -> None:
    await stage.put("binary", b"a\0b")
    with pytest.raises(NotForEnv):
        await stage.refer(SecretUse(name="binary", env="BINARY"))
    assert await stage.refer(SecretUse(name="binary"))


async def test_the_secrets_of_a_unit_fit_into_one_frame(stage: Stage) -> None:
    uses = [SecretUse(name=f"s{index}") for index in range(17)]
    for use in uses:
        await stage.put(use.name, b"x" * (64 << 10))
    assert len(await stage.reveal(*await stage.refer(*uses[:16]))) == 16
    with pytest.raises(SecretsTooBig):
        await stage.refer(*uses)


@pytest.mark.parametrize("size", [0, (64 << 10) + 1])
async def test_a_value_out_of_bounds_is_refused(stage: Stage, size: int) -> None:
    with pytest.raises(Invalid):
        await stage.put("token", b"x" * size)


async def test_what_a_role_does_not_allow_is_denied(stage: Stage) -> None:
    async with stage.db.transaction() as tx:
        for denied in (
            stage.secrets.put(tx, caller("prj_default", "secrets.read"), "token", b"x"),
            service.delete(tx, caller("prj_default", "secrets.read"), "token"),
            service.page(tx, caller("prj_default", "none"), after="", limit=1),
        ):
            with pytest.raises(Denied):
                await denied


async def test_a_deleted_secret_is_gone_for_new_units_and_counts_on_when_it_comes_back(stage: Stage) -> None:
    await stage.put("token", b"one")
    [ref] = await stage.refer(SecretUse(name="token"))
    async with stage.db.transaction() as tx:
        await service.delete(tx, caller(), "token")
        with pytest.raises(NotFound):
            await service.delete(tx, caller(), "token")
        with pytest.raises(NotFound):
            await service.show(tx, caller(), "token")
        assert await service.page(tx, caller(), after="", limit=10) == []
    with pytest.raises(UnknownSecret):
        await stage.refer(SecretUse(name="token"))
    assert await stage.reveal(ref) == {"token": b"one"}
    assert await stage.put("token", b"two") == 2
    assert await stage.reveal(ref) == {"token": b"one"}


async def test_old_versions_stay_while_something_living_refers_to_them(stage: Stage) -> None:
    for value in (b"one", b"two", b"three"):
        await stage.put("token", value)
    stage.living = {("prj_default", "token", 1)}
    assert await stage.prune(keep_s=3600) == 0
    assert await stage.prune() == 1
    assert await stage.reveal(SecretRef(name="token", version=1)) == {"token": b"one"}
    with pytest.raises(VersionGone):
        await stage.reveal(SecretRef(name="token", version=2))
    stage.living = set()
    assert await stage.prune() == 1
    assert await stage.reveal(SecretRef(name="token", version=3)) == {"token": b"three"}


async def test_nothing_is_left_of_a_deleted_secret_in_the_end(stage: Stage) -> None:
    await stage.put("token", b"one")
    async with stage.db.transaction() as tx:
        await service.delete(tx, caller(), "token")
    assert await stage.prune() == 1
    async with stage.db.read() as conn:
        assert await conn.fetchval("select count(*) from secrets.secrets") == 0


async def test_pruning_walks_past_what_it_must_keep(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.secrets.upkeep.BATCH", 2)
    for value in range(6):
        await stage.put("token", b"%d" % value)
    stage.living = {("prj_default", "token", version) for version in (1, 2, 3)}
    assert await stage.prune() == 2


async def test_writers_of_one_secret_each_get_a_version(stage: Stage) -> None:
    versions = await asyncio.gather(*(stage.put("token", b"%d" % index) for index in range(8)))
    assert sorted(versions) == list(range(1, 9))


async def test_rotation_and_rewrapping_disturb_no_reader(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.secrets.upkeep.BATCH", 3)
    refs = []
    for index in range(20):
        await stage.put(f"s{index}", b"value %d" % index)
        refs.append(SecretRef(name=f"s{index}", version=1))
    old = stage.secrets.keyring.current().id
    new = keyring.rotate(stage.folder)
    read, done = 0, asyncio.Event()

    async def keep_reading() -> None:
        nonlocal read
        while not done.is_set() or not read:
            assert (await stage.reveal(*refs))["s7"] == b"value 7"
            read += 1

    reader = asyncio.create_task(keep_reading())
    seen: list[int] = []
    rewrapped = await rewrap(stage.db, Keyring(stage.folder), progress=seen.append)
    done.set()
    await reader
    assert (rewrapped.versions, rewrapped.left, rewrapped.unused) == (20, 0, [old])
    assert seen == sorted(seen)
    assert len(seen) > 5
    (stage.folder / f"{old}.key").unlink()
    assert len(await stage.reveal(*refs)) == 20
    assert await stage.put("s0", b"newer") == 2
    async with stage.db.read() as conn:
        assert {row["key_id"] for row in await conn.fetch("select key_id from secrets.versions")} == {new}


async def test_without_its_key_a_value_is_unavailable_not_wrong(stage: Stage) -> None:
    await stage.put("token", b"one")
    old = stage.secrets.keyring.current().id
    keyring.rotate(stage.folder)
    (stage.folder / f"{old}.key").unlink()
    stage.secrets.keyring.current()
    with pytest.raises(KeyMissing):
        await stage.reveal(SecretRef(name="token", version=1))


async def test_a_row_that_somebody_exchanged_does_not_open(stage: Stage) -> None:
    await stage.put("mine", b"mine", "prj_a")
    await stage.put("theirs", b"theirs", "prj_b")
    async with stage.db.read() as conn:
        await conn.execute(
            "update secrets.versions m set sealed = t.sealed, wrapped_key = t.wrapped_key, key_id = t.key_id"
            " from secrets.versions t where m.name = 'mine' and t.name = 'theirs'"
        )
    with pytest.raises(Tampered):
        await stage.reveal(SecretRef(name="mine", version=1), project_id="prj_a")


async def test_there_is_a_limit_to_secrets_and_to_versions(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SECRETS_MAX", 2)
    monkeypatch.setattr(service, "VERSIONS_MAX", 3)
    for value in (b"1", b"2", b"3"):
        await stage.put("a", value)
    await stage.put("b", b"1")
    for name, code in (("a", "secrets.too_many_versions"), ("c", "secrets.too_many_secrets")):
        with pytest.raises(Exception, match="at most") as caught:
            await stage.put(name, b"x")
        assert getattr(caught.value, "code", "") == code
    await stage.prune()
    assert await stage.put("a", b"4") == 4

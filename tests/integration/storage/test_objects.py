"""The contract of objects: whole or not at all, within the quota, and nothing left behind."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.kit.db import Database
from penstock.kit.errors import PenstockError
from penstock.storage import blobs
from penstock.storage.blobs import Access
from penstock.storage.errors import (
    BadKey,
    Busy,
    DigestMismatch,
    Incomplete,
    NoObject,
    ObjectExists,
    QuotaExceeded,
    StoreAway,
    TooLarge,
    UploadExpired,
)
from penstock.storage.service import Objects, Wanted
from penstock.storage.sweeper import Sweeper

from .conftest import ACTOR, LIMITS, MIB, Stage, access, pieces, start_s3

BIG = os.urandom(12 * MIB)


@pytest.mark.parametrize(("size", "declared"), [(0, True), (1, False), (len(BIG), True), (len(BIG), False)])
async def test_what_was_put_is_got(stage: Stage, size: int, declared: bool) -> None:
    content = BIG[:size]
    made = await stage.put("a/b.bin", content, content_type="text/plain", **({} if declared else {"size": None}))
    assert (made.size, made.sha256, made.content_type) == (size, hashlib.sha256(content).digest(), "text/plain")
    assert await stage.get("a/b.bin") == content
    assert await stage.objects.find("prj_a", "a/b.bin") == made
    assert await stage.used() == size


async def test_a_part_is_got(stage: Stage) -> None:
    made = await stage.put("k", BIG[: 2 * MIB])
    for first, end in ((0, 1), (5, 5), (MIB - 3, MIB + 9), (2 * MIB - 1, 2 * MIB)):
        download = await stage.objects.read(made, first, end)
        assert b"".join([chunk async for chunk in download.chunks]) == BIG[first:end]


async def test_a_new_object_takes_the_place_of_the_old_and_frees_its_bytes(stage: Stage) -> None:
    first = await stage.put("k", b"one")
    reading = await stage.objects.get("prj_a", "k")
    second = await stage.put("k", b"second")
    assert await stage.get("k") == b"second"
    assert await stage.used() == 6
    assert b"".join([chunk async for chunk in reading.chunks]) == b"one"
    assert await stage.sweeper.sweep() == 1
    assert await stage.stored() == {second.blob_id}
    with pytest.raises(NoObject):
        await stage.objects.read(first, 0, 3)


async def test_a_deleted_object_is_gone_and_its_bytes_with_it(stage: Stage) -> None:
    await stage.put("k", b"one")
    await stage.objects.delete("prj_a", "k", actor=ACTOR)
    for absent in (stage.get("k"), stage.objects.delete("prj_a", "k", actor=ACTOR)):
        with pytest.raises(NoObject):
            await absent
    assert await stage.used() == 0
    assert await stage.sweeper.sweep() == 1
    assert (await stage.stored(), await stage.rows("blobs")) == (set(), 0)


async def test_projects_do_not_see_one_another(stage: Stage) -> None:
    await stage.put("k", b"mine", "prj_a")
    with pytest.raises(NoObject):
        await stage.get("k", "prj_b")
    with pytest.raises(NoObject):
        await stage.objects.delete("prj_b", "k", actor=ACTOR)
    await stage.put("k", b"theirs", "prj_b")
    assert (await stage.get("k"), await stage.get("k", "prj_b")) == (b"mine", b"theirs")
    listed = await stage.objects.page("prj_b", prefix="", after="", limit=10, grouped=False)
    assert [each.project_id for each in listed.objects] == ["prj_b"]


async def test_only_a_new_object_is_put_if_so_wanted_also_by_racers(stage: Stage) -> None:
    racers = [stage.put("k", b"%d" % index, only_new=True) for index in range(6)]
    ended = await asyncio.gather(*racers, return_exceptions=True)
    assert sorted(type(each).__name__ for each in ended) == ["Object"] + ["ObjectExists"] * 5
    with pytest.raises(ObjectExists):
        await stage.put("k", b"more", only_new=True)
    await stage.sweeper.sweep()
    assert len(await stage.stored()) == 1
    assert await stage.used() == 1


async def test_racers_for_one_key_leave_one_whole_object(stage: Stage) -> None:
    contents = [bytes([index]) * 1000 for index in range(8)]
    await asyncio.gather(*(stage.put("k", content) for content in contents))
    assert await stage.get("k") in contents
    await stage.sweeper.sweep()
    assert len(await stage.stored()) == 1
    assert await stage.used() == 1000


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ({"sha256": b"\0" * 32}, DigestMismatch),
        ({"size": 1001}, Incomplete),
        ({"size": 65 * MIB}, TooLarge),
    ],
)
async def test_what_is_not_as_announced_leaves_nothing(
    stage: Stage, wanted: dict[str, object], error: type[PenstockError]
) -> None:
    await stage.put("k", b"before")
    with pytest.raises(error):
        await stage.put("k", b"x" * 1000, **wanted)
    assert await stage.get("k") == b"before"
    assert (len(await stage.stored()), await stage.rows("blobs"), await stage.used()) == (1, 1, 6)


async def test_the_right_digest_passes(stage: Stage) -> None:
    await stage.put("k", b"abc", sha256=hashlib.sha256(b"abc").digest())
    assert await stage.get("k") == b"abc"


@pytest.mark.parametrize("after", [0, 11 * MIB])
async def test_an_upload_that_breaks_off_leaves_nothing(stage: Stage, after: int) -> None:
    async def breaking() -> AsyncIterator[bytes]:
        async for piece in pieces(BIG[:after]):
            yield piece
        raise ConnectionResetError

    with pytest.raises((ConnectionResetError, StoreAway)):
        await stage.objects.put("prj_a", "k", breaking(), actor=ACTOR, wanted=Wanted(size=len(BIG)))
    assert (await stage.stored(), await stage.rows("blobs"), await stage.used()) == (set(), 0, 0)
    with pytest.raises(NoObject):
        await stage.get("k")


async def test_an_upload_that_is_cancelled_leaves_nothing(stage: Stage) -> None:
    written = asyncio.Event()

    async def stuck() -> AsyncIterator[bytes]:
        async for piece in pieces(BIG[: 10 * MIB]):
            yield piece
        written.set()
        await asyncio.Event().wait()

    uploading = asyncio.create_task(stage.objects.put("prj_a", "k", stuck(), actor=ACTOR, wanted=Wanted(size=len(BIG))))
    await asyncio.wait_for(written.wait(), 30)
    uploading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await uploading
    assert (await stage.stored(), await stage.rows("blobs"), await stage.used()) == (set(), 0, 0)


async def test_the_quota_holds_against_racers_of_known_length(stage: Stage) -> None:
    """40 MiB for ten uploads of 9: four fit."""
    racers = [stage.put(f"k{index}", BIG[: 9 * MIB]) for index in range(10)]
    ended = await asyncio.gather(*racers, return_exceptions=True)
    assert sum(isinstance(each, QuotaExceeded) for each in ended) == 6
    assert await stage.used() == 36 * MIB
    await stage.sweeper.sweep()
    assert len(await stage.stored()) == 4


async def test_the_quota_holds_against_racers_of_unknown_length(stage: Stage) -> None:
    """What is reserved never passes the limit, and all that did not fit is given back."""
    highest = 0

    async def watched(content: bytes) -> AsyncIterator[bytes]:
        nonlocal highest
        async for piece in pieces(content):
            highest = max(highest, await stage.used())
            yield piece

    async def put(index: int) -> object:
        return await stage.objects.put("prj_a", f"k{index}", watched(BIG[: 9 * MIB]), actor=ACTOR, wanted=Wanted())

    ended = await asyncio.gather(*(put(index) for index in range(6)), return_exceptions=True)
    kept = [each for each in ended if not isinstance(each, BaseException)]
    assert all(isinstance(each, QuotaExceeded) for each in ended if each not in kept)
    assert 1 <= len(kept) <= 4
    assert highest <= 40 * MIB
    assert await stage.used() == len(kept) * 9 * MIB
    assert len(await stage.stored()) == len(kept)


async def test_an_object_of_unknown_length_may_fill_what_is_left(stage: Stage) -> None:
    """Less than a step is left of the quota: what fits is stored, and one byte more is not."""
    left = MIB // 2
    for index, size in enumerate((12 * MIB, 12 * MIB, 12 * MIB, 4 * MIB - left)):
        await stage.put(f"most-{index}", BIG[:size])
    with pytest.raises(QuotaExceeded):
        await stage.objects.put("prj_a", "more", pieces(BIG[: left + 1]), actor=ACTOR, wanted=Wanted())
    await stage.objects.put("prj_a", "rest", pieces(BIG[:left]), actor=ACTOR, wanted=Wanted())
    assert await stage.used() == 40 * MIB


async def test_an_object_of_unknown_length_has_a_limit_too(stage: Stage) -> None:
    small = Objects(stage.db, stage.blobs, replace(LIMITS, object_bytes_max=2 * MIB))
    with pytest.raises(TooLarge):
        await small.put("prj_a", "k", pieces(BIG[: 3 * MIB]), actor=ACTOR, wanted=Wanted())
    assert (await stage.stored(), await stage.used()) == (set(), 0)


async def test_there_is_a_limit_to_uploads_at_once(stage: Stage) -> None:
    none = Objects(stage.db, stage.blobs, replace(LIMITS, uploads_max=0))
    with pytest.raises(Busy):
        await none.put("prj_a", "k", pieces(b"x"), actor=ACTOR, wanted=Wanted(size=1))


async def test_an_upload_whose_lease_ran_out_is_given_up_and_cannot_come_back(stage: Stage) -> None:
    async def late() -> AsyncIterator[bytes]:
        yield b"x" * 1000
        async with stage.db.read() as conn:
            await conn.execute("update storage.blobs set expires_at = now() - interval '1 second'")
        assert await stage.sweeper.sweep() == 1
        yield b"y" * 1000

    with pytest.raises(UploadExpired):
        await stage.objects.put("prj_a", "k", late(), actor=ACTOR, wanted=Wanted(size=2000))
    assert (await stage.stored(), await stage.rows("blobs"), await stage.used()) == (set(), 0, 0)


async def test_a_crash_between_blob_and_row_is_cleaned_up(stage: Stage) -> None:
    """A process that is killed leaves its blob's row, whose lease ends, and the bytes."""
    async with stage.db.transaction() as tx:
        await tx.execute("insert into storage.usage values ('prj_a', 5)")
        await tx.execute(
            "insert into storage.blobs values ('blb_' || repeat('0', 26), 'prj_a', 'writing', 5,"
            " now() + interval '1 minute')"
        )
    async with stage.blobs.writer("blb_" + "0" * 26) as write:
        await write(b"12345")
    assert await stage.sweeper.sweep() == 0
    async with stage.db.read() as conn:
        await conn.execute("update storage.blobs set expires_at = now() - interval '1 second'")
    assert await stage.sweeper.sweep() == 1
    assert (await stage.stored(), await stage.rows("blobs"), await stage.used()) == (set(), 0, 0)


async def test_strays_go_when_they_are_old_and_ours(stage: Stage) -> None:
    kept = await stage.put("k", b"kept")
    stray = "blb_" + "1" * 26
    async with stage.blobs.writer(stray) as write:
        await write(b"stray")
    assert await stage.sweeper.sweep_strays() == 0
    eager = Sweeper(stage.db, stage.blobs, stray_after=timedelta(seconds=-60))
    assert await eager.sweep_strays() == 1
    assert await stage.stored() == {kept.blob_id}
    async with stage.blobs.writer(stray) as write:
        await write(b"another install's")
    async with stage.db.read() as conn:
        await conn.execute("update storage.install set id = id || '-another'")
    assert await eager.sweep_strays() == 0
    assert stray in await stage.stored()


async def test_lists_are_by_key_in_pages_with_prefix_and_delimiter(stage: Stage) -> None:
    keys = ["a", "a.txt", "a/1", "a/2", "a/b/3", "a0", "b", "b/c/d", "é/x"]
    for key in keys:
        await stage.put(key, b"x")

    async def walk(limit: int, *, prefix: str = "", grouped: bool = False) -> tuple[list[str], list[str]]:
        found, groups, after = list[str](), list[str](), ""
        while True:
            page = await stage.objects.page("prj_a", prefix=prefix, after=after, limit=limit, grouped=grouped)
            assert len(page.objects) + len(page.prefixes) <= limit
            found += [each.key for each in page.objects]
            groups += page.prefixes
            if not (after := page.after):
                return found, groups

    for limit in (1, 2, 100):
        assert await walk(limit) == (sorted(keys), [])
        assert await walk(limit, prefix="a/") == (["a/1", "a/2", "a/b/3"], [])
        assert await walk(limit, grouped=True) == (["a", "a.txt", "a0", "b"], ["a/", "b/", "é/"])
        assert await walk(limit, prefix="a/", grouped=True) == (["a/1", "a/2"], ["a/b/"])
        assert await walk(limit, prefix="none", grouped=True) == ([], [])


async def test_bad_keys_change_nothing(stage: Stage) -> None:
    for key in ("", "../x", "a\0b"):
        with pytest.raises(BadKey):
            await stage.put(key, b"x")
    assert await stage.rows("blobs") == 0


async def test_changes_are_in_the_audit_log(stage: Stage) -> None:
    async with stage.db.read() as conn:
        before = await conn.fetchval("select count(*) from kit.audit where target_id = 'audited'")
    await stage.put("audited", b"x")
    await stage.objects.delete("prj_a", "audited", actor=ACTOR)
    async with stage.db.read() as conn:
        rows = await conn.fetch(
            "select action, target_id, project_id from kit.audit where target_id = 'audited' order by at"
        )
    assert [tuple(row) for row in rows[before:]] == [
        ("objects.write", "audited", "prj_a"),
        ("objects.delete", "audited", "prj_a"),
    ]


async def test_a_killed_process_leaves_no_draft_in_the_folder(database: Database, tmp_path: Path) -> None:
    """The store writes beside the blob, under a name that it does not list."""
    opened = blobs.connect(Access(url=tmp_path.as_uri()))
    draft = tmp_path / "00" / ("blb_" + "0" * 26 + "#1")
    draft.parent.mkdir()
    draft.write_bytes(b"half")
    async with database.transaction() as tx:
        await tx.execute("insert into storage.usage values ('prj_a', 5)")
        await tx.execute(
            "insert into storage.blobs values ($1, 'prj_a', 'writing', 5, now() - interval '1 minute')", draft.name[:-2]
        )
    assert await Sweeper(database, opened).sweep() == 1
    assert not draft.exists()


async def test_a_bucket_that_dies_during_an_upload_is_unavailable_and_told_without_credentials(
    database: Database,
) -> None:
    server = await start_s3()
    opened = blobs.connect(access(server, "x"))
    objects = Objects(database, opened, LIMITS)

    async def killing() -> AsyncIterator[bytes]:
        async for piece in pieces(BIG[: 9 * MIB]):
            yield piece
        server.process.kill()
        await server.process.wait()
        async for piece in pieces(BIG[9 * MIB :]):
            yield piece

    with capture_logs() as logs, pytest.raises(StoreAway):
        await objects.put("prj_a", "k", killing(), actor=ACTOR, wanted=Wanted(size=len(BIG)))
    assert logs
    assert "canary-credential" not in str(logs) + repr(access(server, "x"))
    async with database.read() as conn:
        assert await conn.fetchval("select bytes_used from storage.usage") == 0
        assert [row["state"] for row in await conn.fetch("select state from storage.blobs")] == ["doomed"]
        assert await conn.fetchval("select count(*) from storage.objects") == 0
    with pytest.raises(StoreAway):
        await objects.put("prj_a", "k", pieces(b"x"), actor=ACTOR, wanted=Wanted(size=1))


@pytest.mark.parametrize("url", ["", "objects", "file://host/x", "http://x/y", "s3://"])
def test_a_url_that_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(PenstockError, match="objects_url must look like"):
        blobs.connect(Access(url=url))

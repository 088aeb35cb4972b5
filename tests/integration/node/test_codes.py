"""The archives that a node keeps: fetched once, whole or not there, the longest unused go first."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.node import codes as module
from penstock.node.codes import Away, Codes
from penstock.node.errors import Failed
from penstock.wire.tasks import Code


def code(content: bytes) -> Code:
    return Code(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))


class Gateway:
    """Gives what the test says, and counts."""

    def __init__(self, *answers: bytes | Exception) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def fetch(self, allocation_id: str) -> AsyncIterator[bytes]:
        """Half of it before anything goes wrong."""
        self.asked += 1
        answer = self.answers.pop(0)
        yield b"" if isinstance(answer, Exception) else answer[: len(answer) // 2]
        await asyncio.sleep(0)
        if isinstance(answer, Exception):
            raise answer
        yield answer[len(answer) // 2 :]


async def test_those_who_want_the_same_share_one_fetch(tmp_path: Path) -> None:
    gateway = Gateway(b"archive")
    codes = Codes(tmp_path / "codes", gateway.fetch, bytes_max=100)
    codes.expect(code(b"archive"), "alc_1")
    found = await asyncio.gather(*(codes.get(code(b"archive"), f"alc_{n}") for n in range(3)))
    assert {path.read_bytes() for path in found} == {b"archive"}
    assert gateway.asked == 1


async def test_a_gateway_that_is_away_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "backoff_s", lambda *_, **__: 0.0)
    gateway = Gateway(Away("503"), ConnectionResetError("gone"), b"archive")
    codes = Codes(tmp_path / "codes", gateway.fetch, bytes_max=100)
    assert (await codes.get(code(b"archive"), "alc_1")).read_bytes() == b"archive"
    gateway.answers += [Away("503")] * 5
    with pytest.raises(Failed) as failed:
        await codes.get(code(b"other"), "alc_1")
    assert failed.value.code == "code_unavailable"
    assert [entry.name for entry in (tmp_path / "codes").iterdir()] == [code(b"archive").sha256]


@pytest.mark.parametrize("content", [b"shorter", b"archive!", b"archive and much more than that"])
async def test_other_bytes_are_never_kept_and_are_no_fault_of_the_archive(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "backoff_s", lambda *_, **__: 0.0)
    gateway = Gateway(*[content] * 5, content, b"archives")
    codes = Codes(tmp_path / "codes", gateway.fetch, bytes_max=100)
    wanted = code(b"archives")
    with pytest.raises(Failed) as failed:
        await codes.get(wanted, "alc_1")
    assert failed.value.code == "code_unavailable"
    assert "other bytes" in failed.value.detail
    assert list((tmp_path / "codes").iterdir()) == []
    assert (await codes.get(wanted, "alc_1")).read_bytes() == b"archives"
    assert gateway.asked == 7


async def test_the_nodes_own_limit_is_no_fault_of_the_archive(tmp_path: Path) -> None:
    codes = Codes(tmp_path / "codes", Gateway(bytes(101)).fetch, bytes_max=100)
    with pytest.raises(Failed) as failed:
        await codes.get(code(bytes(101)), "alc_1")
    assert failed.value.code == "code_unavailable"
    assert "keeps at most 100" in failed.value.detail


async def test_an_archive_that_changed_on_the_disk_is_told_from_a_whole_one(tmp_path: Path) -> None:
    codes = Codes(tmp_path / "codes", Gateway(b"archive").fetch, bytes_max=100)
    kept = await codes.get(code(b"archive"), "alc_1")
    assert not await codes.drop_damaged(kept)
    kept.write_bytes(bytes(7))
    assert await codes.drop_damaged(kept)
    assert not kept.exists()


async def test_the_longest_unused_make_room(tmp_path: Path) -> None:
    contents = [bytes([n]) * 40 for n in range(3)]
    gateway = Gateway(*contents, contents[0])
    codes = Codes(tmp_path / "codes", gateway.fetch, bytes_max=100)
    first, second = [await codes.get(code(content), "alc_1") for content in contents[:2]]
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    await codes.get(code(contents[0]), "alc_1")
    third = await codes.get(code(contents[2]), "alc_1")
    assert [path.exists() for path in (first, second, third)] == [True, False, True]
    with pytest.raises(Failed):
        await codes.get(code(bytes(101)), "alc_1")


async def test_what_a_dead_agent_left_half_done_goes(tmp_path: Path) -> None:
    (tmp_path / "codes").mkdir()
    (tmp_path / "codes" / ".half").write_bytes(b"x")
    Codes(tmp_path / "codes", Gateway().fetch, bytes_max=100)
    assert list((tmp_path / "codes").iterdir()) == []


async def test_an_unwanted_fetch_ends_with_the_agent(tmp_path: Path) -> None:
    async def never(allocation_id: str) -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    codes = Codes(tmp_path / "codes", never, bytes_max=100)
    codes.expect(code(b"archive"), "alc_1")
    await asyncio.sleep(0)
    await codes.close()
    assert list((tmp_path / "codes").iterdir()) == []

"""Code archives: what the packer writes is unpacked, and whatever else an archive holds refuses all of it, in bounded
time, outside of the agent's own process."""

import asyncio
import gzip
import io
import os
import stat
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.node import archives
from penstock.node.archives import Limits
from penstock.node.errors import Failed
from penstock.sdk import packing
from penstock.wire.archives import MEMBERS_MAX

#: A pax header of 1 MiB: the key of each of its records goes on to the header's end.
_PAX_BOMB = b"2 " * (1 << 19) + b"=\n"


def _add(archive: tarfile.TarFile, name: str, content: bytes = b"", **changes: object) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for field, value in changes.items():
        setattr(member, field, value)
    archive.addfile(member, io.BytesIO(content))


def _archive(folder: Path, fill: Callable[[tarfile.TarFile], None], form: int = tarfile.PAX_FORMAT) -> Path:
    path = folder / "a.tar.gz"
    with tarfile.open(path, "w:gz", format=form) as archive:
        fill(archive)
    return path


def _unpack(path: Path, limits: Limits = archives.LIMITS) -> None:
    asyncio.run(archives.unpack(path, path.parent / "app", uid=None, limits=limits))


def _refused(
    folder: Path,
    fill: Callable[[tarfile.TarFile], None],
    *,
    limits: Limits = archives.LIMITS,
    form: int = tarfile.PAX_FORMAT,
) -> str:
    outside = {entry.name for entry in folder.parent.iterdir()}
    with pytest.raises(Failed) as failed:
        _unpack(_archive(folder, fill, form), limits)
    assert failed.value.code == "bad_code"
    assert {entry.name for entry in folder.parent.iterdir()} == outside
    return failed.value.detail


def test_files_and_folders_come_out_as_they_went_in(tmp_path: Path) -> None:
    def fill(archive: tarfile.TarFile) -> None:
        _add(archive, ".", type=tarfile.DIRTYPE)
        _add(archive, "./pkg/", type=tarfile.DIRTYPE, mode=0o000)
        _add(archive, "./pkg/mod.py", b"x = 1\n", mode=0o600)
        _add(archive, "deep/er/run.sh", b"#!/bin/sh\n", mode=0o4777)
        _add(archive, "n" * 120 + "/" + "m" * 200, b"long")
        _add(archive, "größe.txt", b"\0\xff")

    _unpack(_archive(tmp_path, fill))
    app = tmp_path / "app"
    assert (app / "pkg" / "mod.py").read_bytes() == b"x = 1\n"
    assert (app / "größe.txt").read_bytes() == b"\0\xff"
    assert (app / ("n" * 120) / ("m" * 200)).read_bytes() == b"long"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in app.rglob("*")}
    assert (modes["pkg"], modes["mod.py"], modes["run.sh"]) == (0o755, 0o644, 0o755)


def test_what_the_packer_packs_comes_out(tmp_path: Path) -> None:
    names = ["a.py", "b/c/" + "d" * 90 + "/" + "e" * 90 + ".py", "f" * 101, "ünï/" + "g" * 250, "h", "i" * 100]
    root = tmp_path / "root"
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(os.urandom(len(name) * 37))
    (root / os.fsdecode(b"\xff\xfe.bin")).write_bytes(b"no text")
    (root / "empty").touch(mode=0o755)
    (tmp_path / "a").write_bytes(packing.pack(root).content)
    _unpack(tmp_path / "a")

    def content(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    assert content(tmp_path / "app") == content(root)
    assert os.access(tmp_path / "app" / "empty", os.X_OK)


@pytest.mark.parametrize(
    "name", ["/etc/evil", "../evil", "a/../../evil", "..", "a/" * 70 + "b", "n" * 256, "./../evil", "a\0b" * 60]
)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    assert "not a name below the folder" in _refused(tmp_path, lambda archive: _add(archive, name, b"x"))


@pytest.mark.parametrize(
    "kind",
    [
        *(tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE),
        *(tarfile.GNUTYPE_SPARSE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
        *(tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, b"D", b"M", b"V", b"Z"),
    ],
)
def test_what_is_no_plain_file_is_refused(tmp_path: Path, kind: bytes) -> None:
    def fill(archive: tarfile.TarFile) -> None:
        _add(archive, "link", type=kind, linkname="/etc/passwd")

    assert "neither a file nor a folder" in _refused(tmp_path, fill)


def test_long_names_in_the_way_of_gnu_are_refused(tmp_path: Path) -> None:
    detail = _refused(tmp_path, lambda archive: _add(archive, "n" * 200), form=tarfile.GNU_FORMAT)
    assert "neither a file nor a folder" in detail


def test_a_link_is_no_way_for_the_next_member(tmp_path: Path) -> None:
    def fill(archive: tarfile.TarFile) -> None:
        _add(archive, "out", type=tarfile.SYMTYPE, linkname=str(tmp_path.parent))
        _add(archive, "out/evil", b"x")

    assert "neither a file nor a folder" in _refused(tmp_path, fill)


def test_nothing_is_there_twice(tmp_path: Path) -> None:
    def twice(archive: tarfile.TarFile) -> None:
        _add(archive, "a", b"1")
        _add(archive, "./a", b"2")

    assert "twice" in _refused(tmp_path, twice)


@pytest.mark.parametrize(("first", "second"), [("a", "a/b"), ("a", "a/b/c"), ("a/b", "a")])
def test_a_file_is_no_folder(tmp_path: Path, first: str, second: str) -> None:
    def fill(archive: tarfile.TarFile) -> None:
        _add(archive, first, b"1")
        _add(archive, second, b"2")

    assert "twice" in _refused(tmp_path, fill)


def test_too_many_files_and_bytes_are_refused(tmp_path: Path) -> None:
    def six(archive: tarfile.TarFile) -> None:
        for number in range(6):
            _add(archive, str(number))

    assert "more than 5 files" in _refused(tmp_path, six, limits=Limits(files_max=5))
    (tmp_path / "second").mkdir()
    detail = _refused(
        tmp_path / "second", lambda archive: _add(archive, "a", bytes(1001)), limits=Limits(bytes_max=1000)
    )
    assert "more than 1000 bytes" in detail


def test_folders_that_are_only_meant_count_too(tmp_path: Path) -> None:
    def fill(archive: tarfile.TarFile) -> None:
        for number in range(400):
            _add(archive, f"{number}/" + "a/" * 62 + "b")

    assert "more than 20000 folders" in _refused(tmp_path, fill)


@pytest.mark.parametrize("plain", [bytes(64 << 20), b"\1" * (64 << 20)])
def test_a_bomb_is_stopped_while_it_grows(tmp_path: Path, plain: bytes) -> None:
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(gzip.compress(plain))
    with pytest.raises(Failed) as failed:
        _unpack(path, Limits(bytes_max=1 << 20))
    assert failed.value.code == "bad_code"


@pytest.mark.parametrize(
    "header",
    [
        _PAX_BOMB,
        b"2 " * 2000 + b"=\n",
        b"30 path=short\n",
        b"path=a\n",
        b"0 path=a\n",
        b"20 GNU.sparse.major=1\n",
        b"22 GNU.sparse.map=0,9\n",
        b"17 mtime=1234.56\n",
        b"12 size=999\n",
    ],
)
def test_a_header_that_the_packer_does_not_write_is_refused_at_once(tmp_path: Path, header: bytes) -> None:
    def fill(archive: tarfile.TarFile) -> None:
        _add(archive, "h", header, type=tarfile.XHDTYPE)
        _add(archive, "a", b"x")

    before = time.monotonic()
    assert "header of an entry" in _refused(tmp_path, fill)
    assert time.monotonic() - before < 10


def test_a_header_after_another_is_refused(tmp_path: Path) -> None:
    def fill(archive: tarfile.TarFile) -> None:
        for _ in range(2):
            _add(archive, "h", b"10 path=a\n", type=tarfile.XHDTYPE)
        _add(archive, "b", b"x")

    assert "header of an entry" in _refused(tmp_path, fill)


async def test_the_loop_goes_on_and_the_process_ends_with_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the reader itself to hang, the process would be killed, and nobody else would notice."""
    monkeypatch.setattr(archives, "_PROGRAM", "while True: pass")
    path = _archive(tmp_path, lambda archive: _add(archive, "a"))
    unpacking = asyncio.create_task(archives.unpack(path, tmp_path / "app", uid=None, limits=Limits(wall_s=1)))
    beats = 0
    while not unpacking.done():
        await asyncio.sleep(0.02)
        beats += 1
    with pytest.raises(Failed) as failed:
        await unpacking
    assert failed.value.code == "code_not_unpacked"
    assert beats > 20


@pytest.mark.parametrize(
    ("unpack", "detail"),
    [
        ("any(iter(int, 1))", "more than 1 s of processor time"),
        ("bytearray(1 << 40)", "Cannot allocate memory"),
        ("os.kill(os.getpid(), 9)", "ended with -9"),
        ("(_ for _ in ()).throw(OSError(errno.EFBIG, ''))", "File too large"),
        ("(_ for _ in ()).throw(OSError(errno.ENAMETOOLONG, ''))", "File name too long"),
    ],
)
def test_a_failure_of_the_node_is_no_fault_of_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unpack: str, detail: str
) -> None:
    """The reader's own limits are those of the format: time, memory and the system's errors depend on the node."""
    broken = f"import errno, os; from penstock.node import unpacker; unpacker.unpack = lambda **_: {unpack}"
    program = archives._PROGRAM.replace("from penstock.node.unpacker import main", f"{broken}; main = unpacker.main")
    monkeypatch.setattr(archives, "_PROGRAM", program)
    with pytest.raises(Failed) as failed:
        _unpack(_archive(tmp_path, lambda archive: _add(archive, "a")), Limits(cpu_s=1, wall_s=60))
    assert failed.value.code == "code_not_unpacked"
    assert detail in failed.value.detail


def test_nothing_is_left_behind_when_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"import time; time.sleep(1000)  # {tmp_path}"
    monkeypatch.setattr(archives, "_PROGRAM", program)
    path = _archive(tmp_path, lambda archive: _add(archive, "a"))

    def running() -> list[Path]:
        return [each for each in Path("/proc").glob("[0-9]*/cmdline") if program.encode() in _content(each)]

    before = _unreaped()

    async def give_up() -> None:
        async with asyncio.timeout(0.3):
            await archives.unpack(path, tmp_path / "app", uid=None)

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    assert running() == []
    assert _unreaped() <= before


def _unreaped() -> set[str]:
    """Children of this process that ended and were not waited for: their command lines are empty."""
    stats = [_content(each).decode(errors="replace") for each in Path("/proc").glob("[0-9]*/stat")]
    return {stat.split()[0] for stat in stats if stat.rpartition(")")[2].split()[:2] == ["Z", str(os.getpid())]}


def _content(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\3\4 no tar",
        gzip.compress(b"no tar", mtime=0),
        gzip.compress(bytes(1024), mtime=0)[:-9],
        gzip.compress(bytes(512), mtime=0),
        gzip.compress(bytes(4 << 20), mtime=0),
        gzip.compress(bytes(1024) + b"more" * 128, mtime=0),
    ],
)
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(Failed) as failed:
        _unpack(tmp_path / "a")
    assert failed.value.code == "bad_code"


@pytest.mark.parametrize("cut", [100, 600, 2000, 5700, 6200])
def test_an_archive_that_is_cut_off_is_refused(tmp_path: Path, cut: int) -> None:
    path = _archive(tmp_path, lambda archive: _add(archive, "a", b"x" * 5000))
    plain = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(plain[:cut]))
    with pytest.raises(Failed) as failed:
        _unpack(path)
    assert failed.value.code == "bad_code"


def test_several_members_of_gzip_are_one_archive(tmp_path: Path) -> None:
    path = _archive(tmp_path, lambda archive: _add(archive, "a", b"x" * 5000))
    plain = gzip.decompress(path.read_bytes())
    path.write_bytes(b"".join(gzip.compress(plain[at : at + 700]) for at in range(0, len(plain), 700)))
    _unpack(path)
    assert (tmp_path / "app" / "a").read_bytes() == b"x" * 5000


def test_many_members_of_gzip_are_refused(tmp_path: Path) -> None:
    path = _archive(tmp_path, lambda archive: _add(archive, "a"))
    path.write_bytes(gzip.compress(b"") * MEMBERS_MAX + path.read_bytes())
    with pytest.raises(Failed, match=f"more than {MEMBERS_MAX} gzip members"):
        _unpack(path)

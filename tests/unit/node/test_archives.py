"""Code archives: what is plain is unpacked, and whatever else an archive holds refuses all of it."""

import gzip
import io
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.node import archives
from penstock.node.errors import Failed


def _add(archive: tarfile.TarFile, name: str, content: bytes = b"", **changes: object) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for field, value in changes.items():
        setattr(member, field, value)
    archive.addfile(member, io.BytesIO(content))


def _archive(folder: Path, fill: Callable[[tarfile.TarFile], None]) -> Path:
    path = folder / "a.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        fill(archive)
    return path


def _refused(folder: Path, fill: Callable[[tarfile.TarFile], None]) -> str:
    outside = {entry.name for entry in folder.parent.iterdir()}
    with pytest.raises(Failed) as failed:
        archives.unpack(_archive(folder, fill), folder / "app", uid=None)
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

    archives.unpack(_archive(tmp_path, fill), tmp_path / "app", uid=None)
    app = tmp_path / "app"
    assert (app / "pkg" / "mod.py").read_bytes() == b"x = 1\n"
    assert (app / "größe.txt").read_bytes() == b"\0\xff"
    assert (app / ("n" * 120) / ("m" * 200)).read_bytes() == b"long"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in app.rglob("*")}
    assert (modes["pkg"], modes["mod.py"], modes["run.sh"]) == (0o755, 0o644, 0o755)


@pytest.mark.parametrize(
    "name", ["/etc/evil", "../evil", "a/../../evil", "..", "a/" * 70 + "b", "n" * 256, "./../evil"]
)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    assert "not a name below the folder" in _refused(tmp_path, lambda archive: _add(archive, name, b"x"))


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE, b"S"],
)
def test_what_is_no_plain_file_is_refused(tmp_path: Path, kind: bytes) -> None:
    def fill(archive: tarfile.TarFile) -> None:
        _add(archive, "link", type=kind, linkname="/etc/passwd")

    assert "code archive cannot be used" in _refused(tmp_path, fill)


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


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    def fill(archive: tarfile.TarFile) -> None:
        _add(archive, "a", b"1")
        _add(archive, "a/b", b"2")

    assert "twice" in _refused(tmp_path, fill)


def test_too_many_files_and_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "FILES_MAX", 5)

    def six(archive: tarfile.TarFile) -> None:
        for number in range(6):
            _add(archive, str(number))

    assert "more than 5 files" in _refused(tmp_path, six)
    monkeypatch.setattr(archives, "BYTES_MAX", 1000)
    (tmp_path / "second").mkdir()
    assert "more than 1000 bytes" in _refused(tmp_path / "second", lambda archive: _add(archive, "a", bytes(1001)))


def test_a_bomb_is_stopped_while_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "BYTES_MAX", 1 << 20)
    monkeypatch.setattr(archives, "_HEADERS_BYTES_MAX", 1 << 20)
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(gzip.compress(bytes(8 << 20)))
    with pytest.raises(Failed, match="more than"):
        archives.unpack(path, tmp_path / "app", uid=None)


def test_a_header_that_would_be_read_whole_is_bounded(tmp_path: Path) -> None:
    def fill(archive: tarfile.TarFile) -> None:
        _add(archive, "h", bytes(2 << 20), type=tarfile.XHDTYPE)

    assert "a header has" in _refused(tmp_path, fill)


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\3\4 no tar", gzip.compress(b"no tar", mtime=0), gzip.compress(bytes(1024), mtime=0)[:-9]],
)
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(Failed) as failed:
        archives.unpack(tmp_path / "a", tmp_path / "app", uid=None)
    assert failed.value.code == "bad_code"


def test_an_archive_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = _archive(tmp_path, lambda archive: _add(archive, "a", b"x" * 5000))
    plain = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(plain[:2000]))
    with pytest.raises(Failed) as failed:
        archives.unpack(path, tmp_path / "app", uid=None)
    assert failed.value.code == "bad_code"

"""A backup of a stopped install: whole, or not at all. That it comes back is shown end to end."""

import tarfile
from pathlib import Path

import pytest

from penstock.kit.errors import Unavailable
from penstock.processes.up import backup
from penstock.processes.up.folder import DataFolder


@pytest.fixture
def folder(tmp_path: Path) -> DataFolder:
    """What an install leaves behind, as far as a backup looks at it."""
    folder = DataFolder(tmp_path / "data")
    for name in ("postgres/PG_VERSION", "objects/ab/one", "secrets/master"):
        (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.path / name).write_text("x")
    return folder


def test_a_stopped_install_cannot_start_while_it_is_copied(folder: DataFolder, tmp_path: Path) -> None:
    holders: list[int | None] = []
    backup.create(folder, tmp_path / "b.tar.gz", {}, lambda _: holders.append(folder.holder()))
    assert holders
    assert None not in holders
    assert folder.holder() is None
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        names = set(archive.getnames())
    assert {"manifest.json", "postgres/PG_VERSION", "objects/ab/one", "secrets/master"} <= names


def test_an_install_that_just_starts_is_not_copied(folder: DataFolder, tmp_path: Path) -> None:
    with folder.locked(), pytest.raises(Unavailable, match="starting or stopping"):
        backup.create(folder, tmp_path / "b.tar.gz", {}, lambda _: None)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["data"]


def test_what_is_kept_elsewhere_is_said_to_be_missing(folder: DataFolder, tmp_path: Path) -> None:
    said: list[str] = []
    backup.create(folder, tmp_path / "b.tar.gz", {"PENSTOCK_SECRETS_DIR": "/elsewhere"}, said.append)
    assert any("PENSTOCK_SECRETS_DIR" in line for line in said)

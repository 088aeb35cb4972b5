"""The data folder tells the truth to other commands, and has one owner at a time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kit.errors import Invalid
from penstock.processes.up.folder import AlreadyRunning, DataFolder, Instance


@pytest.fixture
def folder(tmp_path: Path) -> DataFolder:
    made = DataFolder(tmp_path / "data")
    made.prepare()
    return made


def test_nobody_else_can_read_it(folder: DataFolder) -> None:
    folder.path.chmod(0o755)
    folder.prepare()
    folder.save_instance(Instance(api="a", gateway="g", key="psk_x", pid=1))
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert (folder.path / "instance.json").stat().st_mode & 0o777 == 0o600


def test_a_path_that_is_a_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Invalid, match=r"cannot use .*/file"):
        DataFolder(tmp_path / "file").prepare()


def test_the_second_owner_is_told_who_the_first_is(folder: DataFolder) -> None:
    with folder.locked():
        assert folder.holder() == os.getpid()
        with pytest.raises(AlreadyRunning, match=f"pid {os.getpid()}"), folder.locked():
            pass
    assert folder.holder() is None


def test_the_lock_of_a_killed_owner_is_free(folder: DataFolder) -> None:
    hold = (
        "import sys, time; from pathlib import Path; from penstock.processes.up.folder import DataFolder\n"
        "with DataFolder(Path(sys.argv[1])).locked(): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, str(folder.path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        assert folder.holder() == owner.pid
        owner.kill()
    assert folder.holder() is None
    with folder.locked():
        pass


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"api": 3}'])
def test_damaged_state_files_count_as_absent(folder: DataFolder, content: bytes) -> None:
    for name in ("instance.json", "status.json", "ports.json"):
        (folder.path / name).write_bytes(content)
    assert folder.instance() is None
    assert folder.status() is None
    assert folder.ports() is None

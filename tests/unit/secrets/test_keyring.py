"""The folder of master keys: made once, closed to others, read again when it changes."""

import stat
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.secrets import keyring
from penstock.secrets.errors import KeyMissing
from penstock.secrets.keyring import Keyring


def test_it_is_made_once_and_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    first = keyring.init(folder)
    assert first is not None
    assert keyring.init(folder) is None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in (folder / f"{first}.key", folder / "current"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len((folder / f"{first}.key").read_bytes()) == 32
    assert Keyring(folder).current().id == first


def test_a_new_key_is_used_without_a_restart_and_the_old_one_still_opens(tmp_path: Path) -> None:
    first = keyring.init(tmp_path)
    ring = Keyring(tmp_path)
    old = ring.current()
    second = keyring.rotate(tmp_path)
    assert ring.current().id == second != first
    assert ring.key(old.id) == old
    assert ring.ids() == [first, second]


def test_a_key_that_arrives_later_is_found(tmp_path: Path) -> None:
    """Keys are copied from host to host one by one."""
    keyring.init(tmp_path / "a")
    second = keyring.rotate(tmp_path / "a")
    keyring.init(tmp_path / "b")
    ring = Keyring(tmp_path / "b")
    with pytest.raises(KeyMissing):
        ring.key(second)
    copy = tmp_path / "b" / f"{second}.key"
    copy.write_bytes((tmp_path / "a" / copy.name).read_bytes())
    copy.chmod(0o600)
    assert ring.key(second).raw == copy.read_bytes()


def test_a_removed_key_is_gone_once_the_folder_is_read_again(tmp_path: Path) -> None:
    first = keyring.init(tmp_path)
    assert first is not None
    keyring.rotate(tmp_path)
    ring = Keyring(tmp_path)
    (tmp_path / f"{first}.key").unlink()
    ring.current()
    with pytest.raises(KeyMissing):
        ring.key(first)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_what_is_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    first = keyring.init(tmp_path)
    (tmp_path / f"{first}.key").write_bytes(content)
    with pytest.raises(KeyMissing, match="is not a key"):
        Keyring(tmp_path)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    first = keyring.init(tmp_path)
    (tmp_path / f"{first}.key").chmod(0o604)
    with pytest.raises(KeyMissing, match="can be read by others"):
        Keyring(tmp_path)


def test_a_folder_without_keys_says_how_to_make_them(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(KeyMissing, match=r"secrets-key init|cannot read"):
            Keyring(folder)
    with pytest.raises(KeyMissing, match="secrets-key init"):
        keyring.rotate(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


def test_a_current_key_that_is_not_there_is_named(tmp_path: Path) -> None:
    first = keyring.init(tmp_path)
    (tmp_path / f"{first}.key").unlink()
    with pytest.raises(KeyMissing, match=str(first)):
        Keyring(tmp_path)


def test_what_is_wrong_with_the_folder_is_not_for_callers(tmp_path: Path) -> None:
    keyring.init(tmp_path / "keys")
    ring = Keyring(tmp_path / "keys")
    (tmp_path / "keys" / "current").unlink()
    with capture_logs() as logs, pytest.raises(KeyMissing) as caught:
        ring.current()
    assert str(tmp_path) not in caught.value.detail
    assert str(tmp_path) in logs[0]["detail"]

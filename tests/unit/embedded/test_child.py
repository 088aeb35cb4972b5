"""What a child's ending and log look like."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.embedded import child
from penstock.embedded.child import Child


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with code 0"),
        (3, "ended with code 3"),
        (-9, "was killed by SIGKILL"),
        (-77, "was killed by signal 77"),
    ],
)
def test_ending_is_told_in_words(code: int, words: str) -> None:
    assert Child("x", SimpleNamespace(returncode=code, pid=1), Path("log")).ending == words


def test_a_forbidden_namespace_says_what_to_do() -> None:
    ended = Child("x", SimpleNamespace(returncode=child._NO_NAMESPACE, pid=1), Path("log")).ending
    assert "run as an ordinary user" in ended


def test_a_large_log_is_emptied_in_place_and_its_end_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "LOG_BYTES_MAX", 10)
    log = tmp_path / "api.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"0123456789abcdef")
        child.rotate(log)
        writer.write(b"after")
    assert log.read_bytes() == b"after"
    assert (tmp_path / "api.log.1").read_bytes() == b"6789abcdef"


def test_a_small_log_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "api.log"
    log.write_bytes(b"short")
    child.rotate(log)
    assert log.read_bytes() == b"short"
    assert not (tmp_path / "api.log.1").exists()

"""What of a folder is packed, and that the same folder always makes the same archive."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from penstock.sdk import packing
from penstock.sdk.errors import InvalidArgument
from penstock.sdk.packing import Ignored, pack


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "code"
    for name in ("main.py", "lib/one.py", "lib/two.py", "data/big.bin", ".git/config", "lib/__pycache__/one.pyc"):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return root


def names(content: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return tar.getnames()


def test_the_same_files_make_the_same_bytes(folder: Path) -> None:
    first = pack(folder)
    os.utime(folder / "main.py", (1, 1))
    (folder / "lib/__pycache__/two.pyc").write_text("x")
    (folder / "main.py").chmod(0o600)
    assert pack(folder) == first
    (folder / "main.py").write_text("other")
    assert pack(folder).sha256 != first.sha256


def test_tools_and_ignored_files_are_left_out(folder: Path) -> None:
    assert names(pack(folder).content) == ["data/big.bin", "lib/one.py", "lib/two.py", "main.py"]
    (folder / ".gitignore").write_text("# data\ndata/\n*.py\n!/main.py\n")
    (folder / ".penstockignore").write_text(".gitignore\n.penstockignore\n!lib/two.py\n")
    assert names(pack(folder).content) == ["lib/two.py", "main.py"]


@pytest.mark.parametrize(
    ("rule", "path", "out"),
    [
        ("*.log", "a/b/c.log", True),
        ("*.log", "c.logs", False),
        ("/top.py", "top.py", True),
        ("/top.py", "a/top.py", False),
        ("a/*.py", "a/x.py", True),
        ("a/*.py", "a/b/x.py", False),
        ("a/**/x.py", "a/b/c/x.py", True),
        ("a/**/x.py", "a/x.py", True),
        ("**/x", "deep/er/x", True),
        ("logs/**", "logs/a/b", True),
        ("data?.bin", "data1.bin", True),
        ("data[0-3].bin", "data4.bin", False),
        ("data[!0-3].bin", "data4.bin", True),
        (r"\#x", "#x", True),
        ("a.b", "aXb", False),
        ("build/", "build", False),
    ],
)
def test_patterns_are_those_of_git(rule: str, path: str, out: bool) -> None:
    assert Ignored([rule])(path, folder=False) is out


def test_links_stay_in_the_folder(folder: Path, tmp_path: Path) -> None:
    (folder / "again.py").symlink_to("main.py")
    assert "again.py" in names(pack(folder).content)
    (folder / "out.py").symlink_to(tmp_path / "elsewhere.py")
    (tmp_path / "elsewhere.py").write_text("secret")
    with pytest.raises(InvalidArgument, match=r"out\.py is no file in the folder"):
        pack(folder)
    (folder / "out.py").unlink()
    (folder / "there").symlink_to(tmp_path)
    with pytest.raises(InvalidArgument, match="link to a folder"):
        pack(folder)


def test_too_much_is_refused_with_the_largest_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "data/big.bin").write_bytes(b"x" * 5000)
    monkeypatch.setattr(packing, "BYTES_MAX", 4096)
    with pytest.raises(InvalidArgument, match=r"the largest: data/big\.bin \(4 KiB\)"):
        pack(folder)
    monkeypatch.setattr(packing, "BYTES_MAX", 1 << 20)
    monkeypatch.setattr(packing, "FILES_MAX", 2)
    with pytest.raises(InvalidArgument, match="2 files"):
        pack(folder)

"""What of a folder is packed, and that the same folder always makes the same archive."""

import io
import os
import random
import subprocess
import tarfile
from pathlib import Path

import pytest

from penstock.sdk import packing
from penstock.sdk.errors import InvalidArgument
from penstock.sdk.packing import pack


def write(root: Path, *names: str) -> None:
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "code"
    write(root, "main.py", "lib/one.py", "lib/two.py", "data/big.bin", ".git/config", "lib/__pycache__/one.pyc")
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


def test_files_and_bytes_are_counted(folder: Path) -> None:
    made = pack(folder)
    assert made.files == 4
    assert made.bytes == sum(len(name) for name in ("data/big.bin", "lib/one.py", "lib/two.py", "main.py"))


@pytest.mark.parametrize("name", [".env", ".env.local", ".envrc", "deep/er/.env", ".venv/lib/x.py", "a/.git/config"])
def test_secrets_and_history_never_come_along(folder: Path, name: str) -> None:
    write(folder, name)
    (folder / ".penstockignore").write_text("!.env*\n!.venv\n!.git\n")
    assert name not in names(pack(folder).content)


def test_rules_of_nested_folders_count_below_them(folder: Path) -> None:
    write(folder, "lib/notes.txt", "lib/deep/notes.txt", "notes.txt", "lib/deep/kept.txt")
    (folder / ".gitignore").write_text("kept.txt\n")
    (folder / "lib/.gitignore").write_text("notes.txt\n")
    (folder / "lib/deep/.gitignore").write_text("!kept.txt\n/notes.txt\n")
    found = names(pack(folder).content)
    assert "notes.txt" in found
    assert "lib/deep/kept.txt" in found
    assert not {"lib/notes.txt", "lib/deep/notes.txt"} & set(found)


def test_rules_of_the_repository_above_count(tmp_path: Path) -> None:
    write(tmp_path, "repo/.git/HEAD", "repo/app/main.py", "repo/app/secret.txt", "repo/app/big.bin", "repo/app/x/y.log")
    (tmp_path / "repo/.gitignore").write_text("secret.txt\napp/x/*.log\n")
    (tmp_path / "repo/.git/info").mkdir()
    (tmp_path / "repo/.git/info/exclude").write_text("*.bin\n")
    assert names(pack(tmp_path / "repo/app").content) == ["main.py"]


def test_a_folder_that_its_repository_ignores_can_be_deployed(tmp_path: Path) -> None:
    write(tmp_path, "repo/.git/HEAD", "repo/scratch/main.py")
    (tmp_path / "repo/.gitignore").write_text("scratch/\n")
    assert names(pack(tmp_path / "repo/scratch").content) == ["main.py"]


def test_nothing_comes_back_below_an_excluded_folder(folder: Path) -> None:
    (folder / ".gitignore").write_text("data/\n!data/big.bin\n")
    assert "data/big.bin" not in names(pack(folder).content)


def test_rules_are_read_as_git_reads_them(folder: Path) -> None:
    """With a mark of the encoding, the line ends of Windows, and a form feed, which ends no line."""
    (folder / ".gitignore").write_bytes(b"\xef\xbb\xbfkeys.json\r\n*.pem\r\nno\x0cte.txt\n")
    write(folder, "keys.json", "a.pem", "te.txt", ".ENV", ".Env.local")
    packed = names(pack(folder).content)
    assert not {"keys.json", "a.pem", ".ENV", ".Env.local"} & {*packed}
    assert "te.txt" in packed


def test_a_chosen_folder_that_git_ignores_is_subject_to_all_other_rules(folder: Path) -> None:
    (folder / ".gitignore").write_text("/scratch\n*.pem\n")
    write(folder, "scratch/main.py", "scratch/k.pem")
    assert names(pack(folder / "scratch").content) == ["main.py"]


def test_links_are_followed_within_the_folder(folder: Path) -> None:
    (folder / "again.py").symlink_to("main.py")
    (folder / "library").symlink_to("lib")
    found = pack(folder)
    assert {"again.py", "library/one.py", "library/two.py"} <= found.names
    assert not found.skipped


def test_rules_count_by_where_they_are_and_not_by_when_a_link_led_to_them(folder: Path) -> None:
    """A link out of a folder leads past the rules above that folder once more: the deeper ones still count more."""
    write(folder, "deep/a/kept.txt", "deep/z/other.txt", "deep/a/z.txt")
    (folder / "deep/.gitignore").write_text("kept.txt\nz.txt\n")
    (folder / "deep/a/.gitignore").write_text("!kept.txt\n!z.txt\n")
    (folder / "deep/a/link").symlink_to("../z/other.txt")
    (folder / "aaa").symlink_to("deep/a")
    packed = pack(folder).names
    assert {"deep/a/kept.txt", "deep/a/z.txt", "deep/a/link", "aaa/kept.txt", "aaa/z.txt"} <= packed


def test_a_link_is_subject_to_the_rules_of_both_places(folder: Path) -> None:
    """Git knows a link as a file, and what it leads to by its own path. Names below the link are names in the archive,
    so that rules for them count too."""
    write(folder, "real/a.txt", "real/b.txt", "real/c.log", "real/sub/d.txt")
    (folder / "real/.gitignore").write_text("*.log\n")
    (folder / "place").mkdir()
    (folder / "place/.gitignore").write_text("!*.log\nlink/b.txt\n/link/sub/\nskipped\nonly_folders/\n")
    for name in ("link", "skipped", "only_folders"):
        (folder / "place" / name).symlink_to("../real")
    packed = pack(folder).names
    assert {name for name in packed if name.startswith("place/")} == {
        "place/.gitignore",
        "place/link/.gitignore",
        "place/link/a.txt",
    }
    assert {"real/a.txt", "real/b.txt", "real/sub/d.txt"} <= packed


_RULES = (
    *("*.log", "!*.log", "/x/p/", "!/x/p/", "x", "!x", "x/", "!x/", "p/*", "!p/*", "p/**", "!p/**", "**/one.txt", "*/"),
    *(
        "!**/one.txt",
        "/x/**/one.txt",
        "*",
        "!*/",
        "!*.txt",
        "q",
        "!q/",
        "x/*/x",
        "[xy]/p",
        "\\!x",
        "# c",
        "two.*",
        "/*",
    ),
)


@pytest.mark.parametrize("seed", range(25))
def test_git_would_commit_the_same_files(tmp_path: Path, seed: int) -> None:
    """Without links and rules of our own, what is packed is what `git add` takes."""
    root, rules = tmp_path / "repo", random.Random(seed)
    write(root, *(f"{a}/{b}/{name}" for a in "xy" for b in "pq" for name in ("one.txt", "two.log", "keep.log", "x")))
    for folder in ("", "x", "y", "x/p", "y/q"):
        if rules.random() < 0.6:
            (root / folder / ".gitignore").write_text("\n".join(rules.choices(_RULES, k=3)) + "\n")
    git = ["git", "-c", "core.excludesFile=/dev/null", "-C", str(root)]
    subprocess.run([*git, "init", "-q"], check=True)
    listed = subprocess.run(
        [*git, "ls-files", "--others", "--exclude-standard"], check=True, capture_output=True, text=True
    )
    assert pack(root).names == set(listed.stdout.splitlines())


def test_other_links_are_left_out_with_a_word(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.py").write_text("secret")
    (folder / ".env").write_text("KEY=1")
    (folder / "lib/up").symlink_to("..")
    (folder / "lib/out.py").symlink_to(tmp_path / "elsewhere.py")
    (folder / "gone.py").symlink_to("nowhere.py")
    (folder / "settings.txt").symlink_to(".env")
    (folder / "away").symlink_to(tmp_path)
    (folder / "history").symlink_to(".git")
    found = pack(folder)
    assert names(found.content) == ["data/big.bin", "lib/one.py", "lib/two.py", "main.py"]
    assert found.skipped == (
        "away is a link that leads out of the folder",
        "gone.py is a link that leads to nothing",
        "history is a link that leads to a file that is left out",
        "lib/out.py is a link that leads out of the folder",
        "lib/up is a link that leads back to a folder that it is in",
        "settings.txt is a link that leads to a file that is left out",
    )


def test_a_pipe_is_left_out_with_a_word(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    assert pack(folder).skipped == ("pipe is not a file",)


def test_too_much_is_refused_with_the_largest_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "data/big.bin").write_bytes(b"x" * 5000)
    monkeypatch.setattr(packing, "BYTES_MAX", 4096)
    with pytest.raises(InvalidArgument, match=r"the largest: data/big\.bin \(4 KiB\)"):
        pack(folder)
    monkeypatch.setattr(packing, "BYTES_MAX", 1 << 20)
    monkeypatch.setattr(packing, "FILES_MAX", 2)
    with pytest.raises(InvalidArgument, match="2 files"):
        pack(folder)

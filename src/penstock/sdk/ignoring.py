"""Files of a folder that are left out of an archive: what git ignores, what `.penstockignore` names, tools, secrets.

Rules are those of `.gitignore` (the `pathspec` library reads them). As in git, a rule is about a path itself: what lies
below a folder shares its fate only if the folder is excluded, and then nothing below it comes back. A deeper file of
rules counts more than one above it, and `.penstockignore` more than `.gitignore` beside it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pathspec import GitIgnoreSpec, Pattern, RegexPattern

#: No rule brings these back: history, environments, caches and files of secrets.
NEVER: Final = (".git", ".hg", ".svn", ".venv", "__pycache__", "*.pyc", ".env*")
#: Left out unless a rule brings them back.
DEFAULTS: Final = (
    *("venv/", "node_modules/", ".DS_Store", "*.egg-info/", ".idea/", ".vscode/"),
    *(".mypy_cache/", ".ruff_cache/", ".pytest_cache/", ".tox/", ".nox/"),
)
_FILES: Final = (".gitignore", ".penstockignore")
_RULES_BYTES_MAX: Final = 1 << 20
_never: Final = GitIgnoreSpec.from_lines(NEVER)


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one file, for paths below its folder."""

    folder: Path
    spec: GitIgnoreSpec

    def verdict(self, path: Path, *, is_folder: bool) -> bool | None:
        """Whether the path is excluded (True) or brought back (False); None where no rule matches."""
        name = path.relative_to(self.folder).as_posix() + "/" * is_folder
        for pattern in reversed(self.spec.patterns):
            if pattern.include is not None and _is_of(pattern, name):
                return pattern.include
        return None


class Ignored:
    """The rules of a folder and of everything below it. The folder of a repository is subject to all rules above it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        #: What counts in a folder, the least first.
        self._rules = {root: [Rules(root, GitIgnoreSpec.from_lines(DEFAULTS)), *_above(root), *_of(root)]}

    def __call__(self, path: Path, *, is_folder: bool) -> bool:
        """Whether the path, which is below the root, is left out, the folders above it aside."""
        if _never.match_file(path.relative_to(self._root).as_posix().lower()):
            return True
        return _excluded(self._in(path.parent), path, is_folder=is_folder)

    def _in(self, folder: Path) -> list[Rules]:
        if folder not in self._rules:
            self._rules[folder] = [*self._in(folder.parent), *_of(folder)]
        return self._rules[folder]


def _excluded(rules: list[Rules], path: Path, *, is_folder: bool) -> bool:
    """By the last file of rules that has a matching one."""
    for each in reversed(rules):
        if path.is_relative_to(each.folder) and path != each.folder:
            verdict = each.verdict(path, is_folder=is_folder)
            if verdict is not None:
                return verdict
    return False


def _is_of(pattern: Pattern, name: str) -> bool:
    """Whether a pattern is of this path itself, and not of a folder above it. The library's expressions match what is
    below a folder too, and mark the folder's end; those of `folder/**` end with the slash and have no mark."""
    assert isinstance(pattern, RegexPattern)
    assert pattern.regex is not None
    found = pattern.regex.finditer(name)
    if pattern.regex.pattern.endswith("/"):
        return any(each.end() < len(name) for each in found)
    return any(each.groupdict().get("ps_d") is None or each.end("ps_d") == len(name) for each in found)


def _of(folder: Path) -> list[Rules]:
    return [made for name in _FILES if (made := _read(folder, folder / name)) is not None]


def _read(folder: Path, file: Path) -> Rules | None:
    if not file.is_file():
        return None
    with file.open("rb") as opened:
        text = opened.read(_RULES_BYTES_MAX).decode("utf-8-sig", errors="replace")
    return Rules(folder, GitIgnoreSpec.from_lines([line.removesuffix("\r") for line in text.split("\n")]))


def _above(root: Path) -> list[Rules]:
    """The rules of the repository that the folder is part of. A folder that one of them excludes as a whole was chosen
    all the same: that rule does not count for it."""
    top = next((folder for folder in (root, *root.parents) if (folder / ".git").exists()), None)
    if top is None:
        return []
    own = _read(top, top / ".git" / "info" / "exclude")
    folders = [folder for folder in reversed(root.parents) if folder.is_relative_to(top)]
    rules = [*([own] if own else []), *(each for folder in folders if (each := _read(folder, folder / ".gitignore")))]
    inside = [folder for folder in (*reversed(root.parents), root) if folder.is_relative_to(top) and folder != top]
    if not any(_excluded(rules, folder, is_folder=True) for folder in inside):
        return rules
    return [
        Rules(each.folder, GitIgnoreSpec([it for it in each.spec.patterns if not _hits(each, it, inside)]))
        for each in rules
    ]


def _hits(rules: Rules, pattern: Pattern, folders: list[Path]) -> bool:
    """Whether the pattern excludes one of these folders."""
    below = [folder for folder in folders if folder.is_relative_to(rules.folder) and folder != rules.folder]
    names = (f"{folder.relative_to(rules.folder).as_posix()}/" for folder in below)
    return pattern.include is True and any(_is_of(pattern, name) for name in names)

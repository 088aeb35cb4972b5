"""The master keys: one folder, in which one key is current and all of them open what they once wrapped.

    <key_id>.key   32 random bytes, for their owner only        current   the id of the key that new versions use

Processes hold a `Keyring`, which reads the folder again when it has changed: a key that is added or removed needs no
restart. Where the folder is copied from host to host, the keys go first and `current` last.
"""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from penstock.kit.ids import new_id
from penstock.kit.telemetry import logger
from penstock.secrets.errors import KeyMissing
from penstock.secrets.model import KEY_BYTES, MasterKey

_CURRENT: Final = "current"
_ID: Final = re.compile(r"[a-z]{3}_[0-9a-z]{1,32}")
_OTHERS: Final = 0o007
#: A folder that changed less long ago may change again without its time telling.
_SETTLED_NS: Final = 2_000_000_000

_log = logger(__name__)


class Keyring:
    """The keys of one folder, as it is now."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen_ns = -1
        self._current_id = ""
        self._keys: dict[str, MasterKey] = {}
        self._load(self._changed_ns())

    def current(self) -> MasterKey:
        """The key for what is written now."""
        self._refresh()
        return self.key(self._current_id)

    def key(self, key_id: str) -> MasterKey:
        """The key of this id."""
        if key_id not in self._keys:
            self._refresh()
        found = self._keys.get(key_id)
        if found is None:
            raise KeyMissing("a key of the secrets' keyring is missing", key_id=key_id)
        return found

    def ids(self) -> list[str]:
        """All keys, oldest first."""
        self._refresh()
        return sorted(self._keys)

    def _refresh(self) -> None:
        try:
            changed_ns = self._changed_ns()
            if changed_ns != self._seen_ns or time.time_ns() - changed_ns < _SETTLED_NS:
                self._load(changed_ns)
        except KeyMissing as error:
            # Where it is and what is wrong with it is not for callers.
            _log.error("keyring_unreadable", detail=error.detail)
            raise KeyMissing("the secrets' keyring cannot be read now") from error

    def _changed_ns(self) -> int:
        try:
            return self._folder.stat().st_mtime_ns
        except OSError as error:
            raise KeyMissing(f"cannot read the secrets' keyring {self._folder}: {error.strerror}") from error

    def _load(self, changed_ns: int) -> None:
        try:
            current_id = (self._folder / _CURRENT).read_text().strip()
            keys = [_read(file) for file in sorted(self._folder.glob("*.key"))]
        except OSError as error:
            hint = "make it with `penstock secrets-key init`"
            raise KeyMissing(f"cannot read the secrets' keyring {self._folder}: {error.strerror}; {hint}") from error
        self._keys = {key.id: key for key in keys}
        self._current_id = current_id
        self._seen_ns = changed_ns
        if current_id not in self._keys:
            raise KeyMissing(f"the secrets' keyring {self._folder} has no key {current_id[:64]!r}, which is current")


def init(folder: Path) -> str | None:
    """Make a keyring with its first key, whose id is returned; one that is there stays."""
    with _locked(folder):
        return None if (folder / _CURRENT).exists() else _add(folder)


def rotate(folder: Path) -> str:
    """Add a key, which new versions use from now on; its id."""
    if not (folder / _CURRENT).exists():
        raise KeyMissing(f"there is no keyring in {folder}: make it with `penstock secrets-key init`")
    with _locked(folder):
        return _add(folder)


def _add(folder: Path) -> str:
    key_id = new_id("smk")
    _write(folder / f"{key_id}.key", os.urandom(KEY_BYTES))
    _write(folder / _CURRENT, f"{key_id}\n".encode())
    return key_id


def _read(file: Path) -> MasterKey:
    raw = file.read_bytes()
    if len(raw) != KEY_BYTES or not _ID.fullmatch(file.stem):
        raise KeyMissing(f"{file} is not a key of the secrets' keyring: {KEY_BYTES} bytes are expected")
    if file.stat().st_mode & _OTHERS:
        raise KeyMissing(f"{file} can be read by others: take that right away (chmod o= {file})")
    return MasterKey(id=file.stem, raw=raw)


def _write(file: Path, content: bytes) -> None:
    """All of it or nothing, never readable by others, and on disk before anything is encrypted with it."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as output:
        output.write(content)
        output.flush()
        os.fsync(output.fileno())
    draft.replace(file)
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield

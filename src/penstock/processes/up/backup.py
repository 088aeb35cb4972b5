"""Backup and restore of one install: Postgres, keys, secrets' master keys, objects. One file, closed to others.

NATS and Temporal are not in it: they are made again from Postgres. Nor is the local node: what runs on nodes is not
kept by a backup, and the node enrols anew.
"""

import asyncio
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Final

import asyncpg
import msgspec

from penstock.embedded import basebackup, postgres
from penstock.embedded.ports import free_port
from penstock.kit.errors import Conflict, Invalid, Unavailable
from penstock.kit.ids import new_id
from penstock.processes.up.folder import AlreadyRunning, DataFolder
from penstock.wire.unreadable import UNREADABLE

_MANIFEST: Final = "manifest.json"
_FORMAT: Final = 1
_KEPT: Final = ("pki", "secrets", "objects", "admin.key", "payments.secret", "postgres.password", "ports.json")
#: Where an operator may have put some of it: the install does not know what is there.
_ELSEWHERE: Final = ("PENSTOCK_SECRETS_DIR", "PENSTOCK_OBJECTS_URL")
#: Agents remember the highest fence that they saw, which may be later than the backup or an earlier restore of it.
#: Fences rise by one per release, and time by more.
_RAISE: Final = """
update compute.allocations set fence = fence + extract(epoch from clock_timestamp())::bigint where ended_at is null
"""

Say = Callable[[str], None]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup says of itself."""

    format: int
    version: str
    created_at: datetime


def create(folder: DataFolder, file: Path, environ: Mapping[str, str], say: Say) -> None:
    """Write a backup of a running or stopped install. `file` is whole or absent."""
    if environ.get("PENSTOCK_DATABASE_URL"):
        raise Invalid(
            "this install uses a Postgres of your own: back that up with its own tools (a physical backup), and the"
            " folders of PENSTOCK_PKI_DIR and PENSTOCK_SECRETS_DIR with it; see docs/runbooks/backup.md",
            field="PENSTOCK_DATABASE_URL",
        )
    if not (folder.path / "postgres" / "PG_VERSION").exists():
        raise Invalid(f"there is no install in {folder.path}", field="data")
    if file.exists():
        raise Conflict(f"{file} exists", field="file")
    with _held(folder) as held, _scratch(folder.path / "backup.new") as scratch:
        say("copying the database")
        password = folder.path / "postgres.password"
        basebackup.copy(folder.path / "postgres", password, scratch / "postgres", held=held)
        manifest = Manifest(format=_FORMAT, version=metadata.version("penstock"), created_at=datetime.now(UTC))
        (scratch / _MANIFEST).write_bytes(msgspec.json.encode(manifest))
        say(f"writing {file}")
        _pack(folder, scratch, file)
    for name in _ELSEWHERE:
        if environ.get(name):
            say(f"not in it: what {name} names; copy that too, now")


@contextmanager
def _held(folder: DataFolder) -> Iterator[bool]:
    """Keep a stopped install from starting; false for a running one."""
    held = True
    with ExitStack() as stack:
        try:
            stack.enter_context(folder.locked())
        except AlreadyRunning:
            held = False
        yield held


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _pack(folder: DataFolder, scratch: Path, file: Path) -> None:
    unfinished = file.with_name(f".{file.name}.unfinished")
    try:
        unfinished.unlink(missing_ok=True)
        unfinished.touch(mode=0o600)
        with tarfile.open(unfinished, "w:gz", compresslevel=1) as archive:
            archive.add(scratch / _MANIFEST, _MANIFEST)
            archive.add(scratch / "postgres", "postgres")
            for name in _KEPT:
                _add(archive, folder.path / name, name)
        unfinished.rename(file)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise Invalid(f"cannot write {file}: {error.strerror}", field="file") from error


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    """What is there; what goes away meanwhile, such as an upload that was given up, is not in it."""
    with suppress(FileNotFoundError):
        archive.add(path, name, recursive=False)
        for entry in sorted(path.iterdir()) if path.is_dir() else ():
            _add(archive, entry, f"{name}/{entry.name}")


def restore(folder: DataFolder, file: Path, say: Say) -> Manifest:
    """Bring a backup into an empty folder, ready for `penstock up`."""
    if folder.path.exists() and any(entry.name not in {"log", "up.lock"} for entry in folder.path.iterdir()):
        raise Conflict(f"{folder.path} is not empty; name another folder with --data", field="data")
    folder.prepare()
    with folder.locked(), _scratch(folder.path / "restore.new") as scratch:
        say(f"reading {file}")
        manifest = _unpack(file, scratch)
        (scratch / "postgres").chmod(0o700)
        say("raising the fences")
        asyncio.run(_mark(scratch / "postgres", folder.log / "restore.log", manifest))
        for entry in sorted(scratch.iterdir()):
            if entry.name in {"postgres", *_KEPT}:
                entry.rename(folder.path / entry.name)
    return manifest


def _unpack(file: Path, target: Path) -> Manifest:
    try:
        with tarfile.open(file, "r:gz") as archive:
            archive.extractall(target, filter="data")
        manifest = msgspec.json.decode((target / _MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        raise Invalid(f"{file} is not there, or is not a backup of Penstock", field="file") from error
    except (OSError, EOFError, tarfile.TarError, *UNREADABLE) as error:
        raise Invalid(f"{file} is not a whole backup of Penstock: {error}", field="file") from error
    if manifest.format != _FORMAT:
        raise Invalid(f"{file} has format {manifest.format}; this version reads {_FORMAT}", field="file")
    return manifest


async def _mark(cluster: Path, log: Path, manifest: Manifest) -> None:
    """What the rows must know: nodes may have gone on after the backup."""
    async with postgres.run(cluster, free_port(), log) as (url, _):
        conn = await asyncpg.connect(url, timeout=10)
        try:
            async with conn.transaction():
                await conn.execute(_RAISE)
                await conn.execute(
                    "insert into kit.audit (id, actor_id, actor_kind, action, target_id, correlation_id, detail)"
                    " values ($1, 'system:restore', 'system', 'install.restore', 'install', $2, $3)",
                    new_id("aud"),
                    new_id("cor"),
                    msgspec.json.encode({"backup_of": manifest.created_at}).decode(),
                )
        except asyncpg.PostgresError as error:
            raise Unavailable(f"the restored database cannot be used: {error}") from error
        finally:
            await conn.close()

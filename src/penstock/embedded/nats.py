"""nats-server with JetStream, for one install, behind a token."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.embedded import binaries, secret
from penstock.embedded.child import Child
from penstock.embedded.server import Server, running


@asynccontextmanager
async def run(folder: Path, port: int, log: Path) -> AsyncIterator[tuple[str, Child]]:
    """Start on `folder`; yields the URL. Stops it at the end."""
    async with running(prepare(folder, port, log)) as started:
        yield started


def prepare(folder: Path, port: int, log: Path) -> Server:
    """The server of `folder`, with its configuration written."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    token = secret.made_once(folder.parent / "nats.token")
    config = folder.parent / "nats.conf"
    secret.keep(config, _configuration(folder, port, token))
    url = f"nats://{token}@127.0.0.1:{port}"
    return Server(
        name="nats",
        argv=(binaries.nats_server(), "-c", config),
        env={},
        log=log,
        port=port,
        url=url,
        answers=lambda: _answers(port, token),
    )


def _configuration(folder: Path, port: int, token: str) -> str:
    return (
        f"host: 127.0.0.1\nport: {port}\nserver_name: embedded\nmax_payload: 8MB\n"
        f"authorization {{ token: {json.dumps(token)} }}\n"
        f"jetstream {{ store_dir: {json.dumps(str(folder))}, max_memory_store: 256MB, max_file_store: 16GB }}\n"
    )


async def _answers(port: int, token: str) -> bool:
    """Whether JetStream answers behind our token; a stranger on the port would not."""
    try:
        async with asyncio.timeout(1):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                return await _ask(reader, writer, token)
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> bool:
    connect = json.dumps({"auth_token": token, "verbose": False, "pedantic": False})
    writer.write(f"CONNECT {connect}\r\nSUB up 1\r\nPUB $JS.API.INFO up 0\r\n\r\n".encode())
    while line := await reader.readline():
        if line.startswith((b"-ERR", b"MSG")):
            return line.startswith(b"MSG")
    return False

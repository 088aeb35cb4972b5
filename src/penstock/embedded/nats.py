"""nats-server with JetStream, for one install, behind a token."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.embedded import binaries, child
from penstock.embedded.child import Child


@asynccontextmanager
async def run(folder: Path, port: int, log: Path) -> AsyncIterator[tuple[str, Child]]:
    """Start on `folder`; yields the URL. Stops it at the end."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    token = _token(folder.parent / "nats.token")
    config = folder.parent / "nats.conf"
    config.touch(mode=0o600)
    config.write_text(
        f'host: 127.0.0.1\nport: {port}\nserver_name: embedded\nmax_payload: 8MB\nauthorization {{ token: "{token}" }}\n'
        f'jetstream {{ store_dir: "{folder}", max_memory_store: 256MB, max_file_store: 16GB }}\n'
    )
    server = await child.start("nats", [binaries.nats_server(), "-c", config], log=log, env={})
    try:
        await server.wait_until(lambda: child.listening(port), timeout_s=30)
        yield f"nats://{token}@127.0.0.1:{port}", server
    finally:
        await asyncio.shield(server.stop())


def _token(file: Path) -> str:
    if not file.exists():
        file.touch(mode=0o600)
        file.write_text(secrets.token_urlsafe(24))
    return file.read_text()

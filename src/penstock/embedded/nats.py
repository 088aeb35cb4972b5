"""nats-server with JetStream, for one install.

Our own processes are one user of the account APP, which holds the streams. Workers' sidecars live in SIDECARS, which
has no JetStream and reaches APP through the imports below only: who one is, the activators say (`auth_callout`), and a
reply subject that a sidecar makes up is one of its own account, never one of APP. Nobody gets in without a password.

It listens on loopback, in plain text. For sidecars of other hosts there can be a second listener, of WebSockets: that
one knows nothing but TLS, and our own user is refused there whatever its password.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.embedded import binaries, secret
from penstock.embedded.child import Child
from penstock.embedded.server import Server, running
from penstock.kit import nkeys
from penstock.wire import subjects

USER: Final = "penstock"
#: What sidecars may ask of APP. A pull has many answers, all others have one at most.
_SERVICES: Final = (
    (subjects.next_messages("WORK", "*"), "stream"),
    (subjects.acks("WORK"), "singleton"),
    (subjects.RESULTS, "singleton"),
    (subjects.METRICS, "singleton"),
    (subjects.OUTPUTS, "singleton"),
    (subjects.CALLS, "singleton"),
    (subjects.dead_letter("dispatch", "*"), "singleton"),
)
#: What APP tells them.
_STREAMS: Final = (subjects.CONTROLS, subjects.CALL_ANSWERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Where sidecars of other hosts connect, and the certificate that they see."""

    host: str
    port: int
    certificate: Path
    key: Path


@asynccontextmanager
async def run(folder: Path, port: int, log: Path, outside: Outside | None = None) -> AsyncIterator[tuple[str, Child]]:
    """Start on `folder`; yields the URL. Stops it at the end."""
    async with running(prepare(folder, port, log, outside)) as started:
        yield started


def prepare(folder: Path, port: int, log: Path, outside: Outside | None = None) -> Server:
    """The server of `folder`, with its configuration written."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    password = secret.made_once(folder.parent / "nats.token")
    issuer = nkeys.Issuer(secret.made_once(issuer_seed(folder), nkeys.new_account_seed))
    config = folder.parent / "nats.conf"
    secret.keep(config, _configuration(folder, port, password, issuer.public) + _listener(outside))
    return Server(
        name="nats",
        argv=(binaries.nats_server(), "-c", config),
        # It shares this machine with all of us: on few cores its threads would mostly look for work that others hold.
        env={"GOMAXPROCS": str(max(1, (os.cpu_count() or 1) // 2))},
        log=log,
        port=port,
        url=f"nats://{USER}:{password}@127.0.0.1:{port}",
        answers=lambda: _answers(port, password),
    )


def issuer_seed(folder: Path) -> Path:
    """The file with the key that signs who sidecars are; the activators need it."""
    return folder.parent / "nats.issuer"


def _configuration(folder: Path, port: int, password: str, issuer: str) -> str:
    return f"""\
host: 127.0.0.1
port: {port}
server_name: embedded
max_payload: 8MB
jetstream {{ store_dir: {json.dumps(str(folder))}, max_memory_store: 256MB, max_file_store: 16GB }}
system_account: SYS
accounts {{
  SYS {{}}
  APP {{
    jetstream: enabled
    users: [ {{ user: {USER}, password: {json.dumps(password)}, allowed_connection_types: [STANDARD] }} ]
    exports: [
      {_lines(_exports())}
    ]
  }}
  SIDECARS {{
    imports: [
      {_lines(_imports())}
    ]
  }}
}}
authorization {{
  timeout: 3
  auth_callout {{ issuer: {issuer}, account: APP, auth_users: [ {USER} ] }}
}}
"""


def _listener(outside: Outside | None) -> str:
    if outside is None:
        return ""
    certificate, key = json.dumps(str(outside.certificate)), json.dumps(str(outside.key))
    return f"""\
websocket {{
  host: {outside.host}
  port: {outside.port}
  tls {{ cert_file: {certificate}, key_file: {key}, min_version: "1.3" }}
}}
"""


def _exports() -> list[str]:
    services = [
        f'{{ service: "{name}", response_type: {answers}, accounts: [SIDECARS] }}' for name, answers in _SERVICES
    ]
    return services + [f'{{ stream: "{name}", accounts: [SIDECARS] }}' for name in _STREAMS]


def _imports() -> list[str]:
    services = [f'{{ service: {{ account: APP, subject: "{name}" }} }}' for name, _ in _SERVICES]
    return services + [f'{{ stream: {{ account: APP, subject: "{name}" }} }}' for name in _STREAMS]


def _lines(entries: list[str]) -> str:
    return "\n      ".join(entries)


async def _answers(port: int, password: str) -> bool:
    """Whether JetStream answers behind our password; a stranger on the port would not."""
    try:
        async with asyncio.timeout(1):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                return await _ask(reader, writer, password)
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, password: str) -> bool:
    connect = json.dumps({"user": USER, "pass": password, "verbose": False, "pedantic": False})
    writer.write(f"CONNECT {connect}\r\nSUB up 1\r\nPUB $JS.API.INFO up 0\r\n\r\n".encode())
    while line := await reader.readline():
        if line.startswith((b"-ERR", b"MSG")):
            return line.startswith(b"MSG")
    return False

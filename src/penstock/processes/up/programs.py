"""What the supervisor starts: our own processes and the embedded servers, each with just the environment it needs."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from penstock.embedded import child, nats, secret
from penstock.embedded.child import Child
from penstock.embedded.ports import free_port, listening
from penstock.embedded.server import Server
from penstock.kit import settings
from penstock.processes.agent import Settings as AgentSettings
from penstock.processes.up import leftovers
from penstock.processes.up.endpoints import HOST
from penstock.processes.up.folder import DataFolder, Ports
from penstock.processes.up.supervisor import Program

CONTROL: Final = ("relay", "worker", "biller", "activator", "api", "gateway")
#: What makes this machine a node, in the order of their stop.
NODE: Final = ("agent", "sidecar")
_OBJECTS: Final = (
    "OBJECTS_URL",
    "OBJECTS_ENDPOINT",
    "OBJECTS_REGION",
    "OBJECTS_ACCESS_KEY_ID",
    "OBJECTS_SECRET_ACCESS_KEY",
)
_PAYMENTS: Final = ("PAYMENTS_WEBHOOK_SECRET", "PAYMENTS_WEBHOOK_SECRET_PREVIOUS", "STRIPE_API_KEY")
#: Settings that say where truth and keys are: the agent, which serves tenants, must not even know them.
_PRIVATE: Final = (
    *("DATABASE_URL", "NATS_URL", "TEMPORAL_ADDRESS", "PKI_DIR", "SECRETS_DIR", "ACTIVATOR_NATS_ISSUER_SEED_FILE"),
    *(*_OBJECTS, *_PAYMENTS),
)
#: The agent's own, such as its enrolment token.
_AGENTS: Final = "PENSTOCK_AGENT_"
_HEALTH_TIMEOUT_S: Final = 2.0
#: Longer than for our own: a server on a slow disk loses more by being ended.
_SERVER_SILENT_MAX_S: Final = 60.0
#: The agent stops its units first.
AGENT_GRACE_S: Final = 45.0
#: How many GPUs a host without a driver pretends to have, and how its agent is told.
SIMULATED: Final = 64
SIMULATED_GPUS: Final = "PENSTOCK_AGENT_SIMULATED_GPUS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where everything is."""

    database_url: str
    nats_url: str
    temporal_address: str
    ports: Ports
    #: Where sidecars of other hosts reach NATS; empty where they cannot.
    nodes_nats_url: str = ""

    @property
    def api(self) -> str:
        """For people."""
        return f"http://{self.ports.host}:{self.ports.api}"

    @property
    def gateway(self) -> str:
        """For people's data."""
        return f"http://{self.ports.host}:{self.ports.gateway}"

    @property
    def link(self) -> str:
        """For nodes."""
        return f"wss://{self.ports.host}:{self.ports.link}"


def of_server(server: Server, folder: DataFolder) -> Program:
    """An embedded server."""
    return Program(
        name=server.name,
        start=lambda _: server.start(leftovers.mark(folder.path)),
        answers=server.answers,
        alive=server.alive or server.answers,
        silent_max_s=_SERVER_SILENT_MAX_S,
        ready_timeout_s=server.ready_timeout_s,
        stop_signal=server.stop_signal,
        grace_s=30.0,
    )


def control(name: str, folder: DataFolder, addresses: Addresses, environ: Mapping[str, str]) -> Program:
    """A process of the control plane."""
    given = {
        "PENSTOCK_DATABASE_URL": addresses.database_url,
        "PENSTOCK_NATS_URL": addresses.nats_url,
        "PENSTOCK_NODES_NATS_URL": addresses.nodes_nats_url,
        "PENSTOCK_TEMPORAL_ADDRESS": addresses.temporal_address,
        "PENSTOCK_PKI_DIR": str(folder.pki),
        "PENSTOCK_SECRETS_DIR": environ.get("PENSTOCK_SECRETS_DIR", "") or str(folder.secrets),
        "PENSTOCK_OBJECTS_URL": environ.get("PENSTOCK_OBJECTS_URL", "") or folder.objects.absolute().as_uri(),
        "PENSTOCK_API_HOST": addresses.ports.host,
        "PENSTOCK_GATEWAY_HOST": addresses.ports.host,
        "PENSTOCK_GATEWAY_LINK_HOST": addresses.ports.host,
        "PENSTOCK_API_PORT": str(addresses.ports.api),
        "PENSTOCK_GATEWAY_PORT": str(addresses.ports.gateway),
        "PENSTOCK_GATEWAY_LINK_PORT": str(addresses.ports.link),
        **_issuer(folder, environ),
        **_payments(folder, addresses, environ),
        **_public(addresses),
    }
    ports = {"api": (addresses.ports.api,), "gateway": (addresses.ports.gateway, addresses.ports.link)}
    listens_on = [(addresses.ports.host, port) for port in ports.get(name, ())]
    return process(name, folder, {**environ, **given}, listens_on=listens_on)


def agent(
    folder: DataFolder, addresses: Addresses, environ: Mapping[str, str], *, enrolment: str, tenant: Path
) -> Program:
    """The local node. Its units survive a crash of it, and end with a clean stop."""
    given = {
        "PENSTOCK_AGENT_DATA_DIR": str(folder.node),
        "PENSTOCK_AGENT_SIDECAR_SOCKET": str(folder.sidecar),
        "PENSTOCK_AGENT_SIDECAR_UID": str(sidecar_uid(folder.node, environ)),
        "PENSTOCK_AGENT_ENROLMENT_TOKEN": enrolment,
        "PENSTOCK_AGENT_TENANT_DIR": environ.get("PENSTOCK_AGENT_TENANT_DIR", "") or str(tenant),
        "PENSTOCK_AGENT_KEEP_UNITS_ON_STOP": "false",
        **_simulated(environ),
        **_public(addresses),
    }
    return process("agent", folder, {**_without_private(environ), **given}, grace_s=AGENT_GRACE_S, owns_group=False)


def _simulated(environ: Mapping[str, str]) -> dict[str, str]:
    """Where nobody says otherwise, a host without a driver is for trying things out."""
    said = settings.read_toml(environ.get("PENSTOCK_CONFIG", "")).get("agent", {})
    if SIMULATED_GPUS in environ or "simulated_gpus" in said:
        return {}
    return {SIMULATED_GPUS: str(SIMULATED)}


def sidecar(folder: DataFolder, addresses: Addresses, environ: Mapping[str, str]) -> Program:
    """What calls the local node's functions. It knows where NATS is and nothing of how we get in."""
    given = {
        "PENSTOCK_SIDECAR_SOCKET": str(folder.sidecar),
        "PENSTOCK_SIDECAR_UID": str(sidecar_uid(folder.node, environ)),
        "PENSTOCK_SIDECAR_NATS_URL": _bare(addresses.nats_url),
        **_public(addresses),
    }
    return process("sidecar", folder, {**for_sidecar(environ), **given})


def for_sidecar(environ: Mapping[str, str]) -> dict[str, str]:
    """What a sidecar may know of the environment."""
    return {name: value for name, value in _without_private(environ).items() if not name.startswith(_AGENTS)}


def nodes_nats_url(ports: Ports, environ: Mapping[str, str]) -> str:
    """What nodes are told that join: an operator's own server is reached as the operator says."""
    if given := environ.get("PENSTOCK_NODES_NATS_URL", ""):
        return given
    ours = ports.host != HOST and not environ.get("PENSTOCK_NATS_URL", "")
    return f"wss://{ports.host}:{ports.nats}" if ours else ""


def _without_private(environ: Mapping[str, str]) -> dict[str, str]:
    """Also without what a process of the control plane has for itself, such as PENSTOCK_WORKER_DATABASE_URL."""
    hidden = tuple(f"PENSTOCK_{name}" for name in _PRIVATE)
    theirs = tuple(f"PENSTOCK_{process.upper()}_" for process in CONTROL)
    return {name: value for name, value in environ.items() if name not in hidden and not name.startswith(theirs)}


def sidecar_uid(node: Path, environ: Mapping[str, str]) -> int:
    """As root, a user that is none of the units' and not the one that builds environments; else our own."""
    if os.geteuid() != 0:
        return 0
    agent = settings.load(AgentSettings, "agent", {**environ, "PENSTOCK_AGENT_DATA_DIR": str(node)})
    return agent.sidecar_uid or agent.uid_first + agent.uid_count + 1


def _bare(nats_url: str) -> str:
    """Without user and password."""
    hosts = [urlsplit(part if "://" in part else f"nats://{part}") for part in nats_url.split(",")]
    return ",".join(f"{host.scheme}://{host.netloc.rpartition('@')[2]}" for host in hosts)


def _issuer(folder: DataFolder, environ: Mapping[str, str]) -> dict[str, str]:
    """The key that sidecars' identities are signed with; an operator's own NATS has one of its own."""
    if environ.get("PENSTOCK_NATS_URL", ""):
        return {}
    return {"PENSTOCK_ACTIVATOR_NATS_ISSUER_SEED_FILE": str(nats.issuer_seed(folder.path / "nats"))}


def _payments(folder: DataFolder, addresses: Addresses, environ: Mapping[str, str]) -> dict[str, str]:
    """On one's own machine payments are played, unless told otherwise; for others to see, there are none."""
    if environ.get("PENSTOCK_PAYMENTS_PROVIDER", "") or addresses.ports.host != HOST:
        return {}
    return {
        "PENSTOCK_PAYMENTS_PROVIDER": "local",
        "PENSTOCK_PAYMENTS_WEBHOOK_SECRET": secret.made_once(folder.payments_secret),
    }


def _public(addresses: Addresses) -> dict[str, str]:
    return {
        "PENSTOCK_API_URL": addresses.api,
        "PENSTOCK_GATEWAY_URL": addresses.gateway,
        "PENSTOCK_LINK_URL": addresses.link,
    }


def process(
    name: str,
    folder: DataFolder,
    environ: Mapping[str, str],
    *,
    listens_on: Sequence[tuple[str, int]] = (),
    grace_s: float = 15.0,
    owns_group: bool = True,
    fixed_ops_port: int = 0,
    cwd: Path | None = None,
) -> Program:
    """One of our own processes, with this environment; its health is on any free port unless it has a fixed one."""
    # Whoever supervises us does not supervise our children.
    env = {**_without(environ, "WATCHDOG_PID"), **leftovers.mark(folder.path)}
    ops_port = 0

    async def start(given: Mapping[str, str]) -> Child:
        nonlocal ops_port
        # Another at each start: somebody may have taken the last one.
        ops_port = fixed_ops_port or free_port()
        command = [sys.executable, "-P", "-m", "penstock.command", "serve", name]
        own = {**env, **given, f"PENSTOCK_{name.upper()}_OPS_PORT": str(ops_port)}
        return await child.start(name, command, log=log_of(folder, name), env=own, cwd=cwd or folder.path)

    async def answers() -> bool:
        return await _healthy(ops_port) and all(listening(port, host) for host, port in listens_on)

    return Program(
        name=name,
        start=start,
        answers=answers,
        heartbeats=True,
        metrics=lambda: f"{HOST}:{ops_port}",
        grace_s=grace_s,
        owns_group=owns_group,
    )


def _without(environ: Mapping[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name}


def log_of(folder: DataFolder, name: str) -> Path:
    """Where the output of a program goes."""
    return folder.log / f"{name}.log"


async def _healthy(ops_port: int) -> bool:
    try:
        async with asyncio.timeout(_HEALTH_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(HOST, ops_port)
            try:
                writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return (await reader.readline()).split()[1:2] == [b"200"]
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False

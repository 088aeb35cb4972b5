"""One host as a node: its agent, and the sidecar that serves functions, watched by one process.

`penstock node join` becomes this. The sidecar runs where the node knows of a NATS server, told when it enrolled or by
the host's own settings, and from when it is reached: a node that cannot serve functions must not say that it does.
Units survive a stop and a crash of all of it, as they survive the agent's.
"""

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from penstock.embedded.child import rotate
from penstock.kit import process, settings
from penstock.kit.telemetry import logger
from penstock.node.identity import Identity
from penstock.processes import agent, sidecar
from penstock.processes.up import programs
from penstock.processes.up.folder import DataFolder
from penstock.processes.up.supervisor import Program, Supervisor

_log = logger(__name__)
_LOOK_S: Final = 10.0
_REACH_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run, in the order of its start; `unreached` is a NATS server that a sidecar would need."""

    programs: list[Program]
    unreached: sidecar.Settings | None = None


async def body(_: AsyncExitStack, loaded: agent.Settings, environ: Mapping[str, str]) -> None:
    """Run until cancelled."""
    folder = DataFolder(Path(loaded.data_dir).absolute())
    while True:
        plan = await plan_of(folder, loaded, environ)
        async with AsyncExitStack() as held:
            supervisor = Supervisor(_nothing, lambda text: _log.warning("child", text=text))
            for program in plan.programs:
                held.push_async_callback(supervisor.stop, [program.name])
                await supervisor.launch(program)
            _log.info("node_runs", logs=str(folder.log), processes=[status.name for status in supervisor.statuses()])
            await _until_reached(plan.unreached, folder)


async def plan_of(folder: DataFolder, loaded: agent.Settings, environ: Mapping[str, str]) -> Plan:
    """A host with a sidecar of its own, or that cannot reach NATS, runs none."""
    who = await _enrolled(folder, loaded)
    alone = Plan(programs=[_agent(folder, loaded, environ)])
    if loaded.sidecar_socket or not (who.nats_url or _says("nats_url", environ)):
        return alone
    uid = str(programs.sidecar_uid(folder.path, environ))
    at_agent = {"PENSTOCK_AGENT_SIDECAR_SOCKET": str(folder.sidecar), "PENSTOCK_AGENT_SIDECAR_UID": uid}
    own = {"PENSTOCK_SIDECAR_SOCKET": str(folder.sidecar), "PENSTOCK_SIDECAR_UID": uid}
    given = {**programs.for_sidecar(environ), **_told(who, environ), **own}
    needs = settings.load(sidecar.Settings, "sidecar", given)
    if not await reaches(needs):
        _log.warning("nats_unreachable", nats_url=needs.nats_url, note="no functions are served until it is reached")
        return replace(alone, unreached=needs)
    return Plan(
        programs=[
            programs.process("sidecar", folder, given, fixed_ops_port=needs.ops_port, cwd=Path.cwd()),
            _agent(folder, loaded, {**environ, **at_agent}),
        ]
    )


async def reaches(needs: sidecar.Settings) -> bool:
    """Whether one of the addresses takes connections."""
    for url in needs.nats_url.split(","):
        parts = urlsplit(url)
        # Elsewhere than in WebSockets, TLS begins after the server's first word.
        tls = sidecar.trust(needs) if parts.scheme == "wss" else None
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_REACH_S):
                _, writer = await asyncio.open_connection(parts.hostname, parts.port or 4222, ssl=tls)
            writer.close()
            return True
    return False


async def _until_reached(needs: sidecar.Settings | None, folder: DataFolder) -> None:
    """Keep the logs short until then; for ever, if nothing is missing."""
    while needs is None or not await reaches(needs):
        await process.guarded(asyncio.to_thread(_bound_logs, folder), name="logs")
        await asyncio.sleep(_LOOK_S)


async def _enrolled(folder: DataFolder, loaded: agent.Settings) -> Identity:
    """Before the agent starts, which then finds what it needs: what to run depends on what the node is told."""
    async with AsyncExitStack() as held:
        return await agent.identify(loaded, agent.own_folder(held, folder.path))


def _told(who: Identity, environ: Mapping[str, str]) -> dict[str, str]:
    """The sidecar's addresses, as far as the host does not say them itself."""
    found: dict[str, str] = {}
    if not _says("gateway_url", environ, shared=True):
        found["PENSTOCK_SIDECAR_GATEWAY_URL"] = who.gateway_url
    if _says("nats_url", environ):
        return found
    found["PENSTOCK_SIDECAR_NATS_URL"] = who.nats_url
    if sidecar.encrypted(who.nats_url) and not _says("nats_ca_file", environ):
        found["PENSTOCK_SIDECAR_NATS_CA_FILE"] = str(who.authority)
    return found


def _says(name: str, environ: Mapping[str, str], *, shared: bool = False) -> bool:
    """Whether the host sets this for its sidecar, by a variable or in the file of settings. NATS' address for our other
    processes is none for a sidecar: it has a password."""
    document = settings.read_toml(environ.get("PENSTOCK_CONFIG", ""))
    said = [environ.get(f"PENSTOCK_SIDECAR_{name.upper()}", ""), document.get("sidecar", {}).get(name, "")]
    if shared:
        said += [environ.get(f"PENSTOCK_{name.upper()}", ""), document.get(name, "")]
    return any(said)


def _agent(folder: DataFolder, loaded: agent.Settings, environ: Mapping[str, str]) -> Program:
    return programs.process(
        "agent",
        folder,
        environ,
        grace_s=programs.AGENT_GRACE_S,
        owns_group=False,
        fixed_ops_port=loaded.ops_port,
        # Paths in its settings may be relative.
        cwd=Path.cwd(),
    )


def _bound_logs(folder: DataFolder) -> None:
    for log in folder.log.glob("*.log"):
        rotate(log)


def _nothing() -> None:
    """Nobody asks for the state of this host's processes; their supervisor's log has it."""


def main() -> None:
    """Run the process."""
    loaded = settings.load(agent.Settings, "agent", os.environ)
    environ = dict(os.environ)
    process.main(
        "node",
        lambda stack: body(stack, loaded, environ),
        level=loaded.log_level,
        log_format=loaded.log_format,
        otlp_endpoint=loaded.otlp_endpoint,
    )


if __name__ == "__main__":
    main()

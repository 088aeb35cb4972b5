"""One host as a node: its agent, and the sidecar that serves functions, watched by one process.

`penstock node join` becomes this. The sidecar runs where the node knows of a NATS server to reach: told when it
enrolled, or by the host's own settings. Units survive a stop and a crash of all of it, as they survive the agent's.
"""

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from penstock.embedded.child import rotate
from penstock.kit import process, settings
from penstock.kit.telemetry import logger
from penstock.node.identity import Identity
from penstock.processes import agent, sidecar
from penstock.processes.up import programs
from penstock.processes.up.folder import DataFolder
from penstock.processes.up.supervisor import Program, Supervisor

_log = logger(__name__)
_ROTATE_EVERY_S: Final = 30.0


async def body(stack: AsyncExitStack, loaded: agent.Settings, environ: Mapping[str, str]) -> None:
    """Run until cancelled."""
    folder = DataFolder(Path(loaded.data_dir).absolute())
    supervisor = Supervisor(_nothing, lambda text: _log.warning("child", text=text))
    for program in await programs_of(folder, loaded, environ):
        stack.push_async_callback(supervisor.stop, [program.name])
        await supervisor.launch(program)
    _log.info("node_runs", logs=str(folder.log), processes=[status.name for status in supervisor.statuses()])
    await process.every(_ROTATE_EVERY_S, lambda: asyncio.to_thread(_bound_logs, folder), name="logs")


async def programs_of(folder: DataFolder, loaded: agent.Settings, environ: Mapping[str, str]) -> list[Program]:
    """In the order of their start. A host with a sidecar of its own, or that cannot reach NATS, gets none."""
    who = await _enrolled(folder, loaded)
    told = _told(who, environ)
    if loaded.sidecar_socket or not told:
        return [_agent(folder, loaded, environ)]
    uid = str(programs.sidecar_uid(folder.path, environ))
    at_agent = {"PENSTOCK_AGENT_SIDECAR_SOCKET": str(folder.sidecar), "PENSTOCK_AGENT_SIDECAR_UID": uid}
    own = {"PENSTOCK_SIDECAR_SOCKET": str(folder.sidecar), "PENSTOCK_SIDECAR_UID": uid}
    given = {**programs.for_sidecar(environ), **told, **own}
    port = settings.load(sidecar.Settings, "sidecar", given).ops_port
    return [
        programs.process("sidecar", folder, given, fixed_ops_port=port, cwd=Path.cwd()),
        _agent(folder, loaded, {**environ, **at_agent}),
    ]


async def _enrolled(folder: DataFolder, loaded: agent.Settings) -> Identity:
    """Before the agent starts, which then finds what it needs: what to run depends on what the node is told."""
    async with AsyncExitStack() as held:
        return await agent.identify(loaded, agent.own_folder(held, folder.path))


def _told(who: Identity, environ: Mapping[str, str]) -> dict[str, str]:
    """The sidecar's addresses; what the host says itself comes first."""
    gateway = environ.get("PENSTOCK_SIDECAR_GATEWAY_URL", "") or environ.get("PENSTOCK_GATEWAY_URL", "")
    found = {"PENSTOCK_SIDECAR_GATEWAY_URL": gateway or who.gateway_url}
    if environ.get("PENSTOCK_SIDECAR_NATS_URL", ""):
        return found
    if not who.nats_url:
        return {}
    found["PENSTOCK_SIDECAR_NATS_URL"] = who.nats_url
    if sidecar.encrypted(who.nats_url):
        trusted = environ.get("PENSTOCK_SIDECAR_NATS_CA_FILE", "") or str(who.authority)
        found["PENSTOCK_SIDECAR_NATS_CA_FILE"] = trusted
    return found


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

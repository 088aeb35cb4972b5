"""One host as a node: its agent, and the sidecar that serves functions, watched by one process.

`penstock node join` becomes this. The sidecar runs where the node knows of a NATS server, told when it enrolled or by
the host's own settings. Units survive a stop and a crash of all of it, as they survive the agent's.
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
_LOOK_S: Final = 10.0


async def body(_: AsyncExitStack, loaded: agent.Settings, environ: Mapping[str, str]) -> None:
    """Run until cancelled."""
    folder = DataFolder(Path(loaded.data_dir).absolute())
    async with AsyncExitStack() as held:
        supervisor = Supervisor(_nothing, lambda text: _log.warning("child", text=text))
        held.callback(supervisor.close)
        for program in await plan(folder, loaded, environ):
            held.push_async_callback(supervisor.stop, [program.name])
            await supervisor.launch(program)
        _log.info("node_runs", logs=str(folder.log), processes=[status.name for status in supervisor.statuses()])
        await process.every(_LOOK_S, lambda: asyncio.to_thread(_bound_logs, folder), name="logs")


async def plan(folder: DataFolder, loaded: agent.Settings, environ: Mapping[str, str]) -> list[Program]:
    """What to run, in the order of its start. A host with a sidecar of its own, or without NATS, runs none."""
    who = await _enrolled(folder, loaded)
    if loaded.sidecar_socket or not (who.nats_url or _says("nats_url", environ)):
        return [_agent(folder, loaded, environ)]
    uid = str(programs.sidecar_uid(folder.path, environ))
    at_agent = {"PENSTOCK_AGENT_SIDECAR_SOCKET": str(folder.sidecar), "PENSTOCK_AGENT_SIDECAR_UID": uid}
    own = {"PENSTOCK_SIDECAR_SOCKET": str(folder.sidecar), "PENSTOCK_SIDECAR_UID": uid}
    given = {**programs.for_sidecar(environ), **_told(who, environ), **own}
    needs = settings.load(sidecar.Settings, "sidecar", given)
    return [
        programs.process("sidecar", folder, given, fixed_ops_port=needs.ops_port, cwd=Path.cwd()),
        _agent(folder, loaded, {**environ, **at_agent}),
    ]


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

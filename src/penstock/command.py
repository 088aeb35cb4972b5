"""The entry point `penstock`: the command line that speaks HTTP, and the processes that answer it."""

import os
import sys
from collections.abc import Mapping
from typing import Annotated, Final

import typer

from penstock.cli.app import ENTRIES, app, run
from penstock.cli.errors import CliError
from penstock.cli.extra import installed, missing, needs_server
from penstock.cli.lazy import Entry, module
from penstock.cli.local import data_folder
from penstock.cli.session import Session, command, group

_TOKEN: Final = "PENSTOCK_AGENT_ENROLMENT_TOKEN"  # noqa: S105 (a name)
_TOKEN_CHARACTERS_MAX: Final = 1024
_PANEL: Final = "Run a cloud on this machine"
_PROCESSES: Final = {
    "up": "Start the whole cloud here.",
    "down": "Stop the local cloud.",
    "status": "Show whether the local cloud is ready.",
    "serve": "Run one process.",
    "backup": "Write everything that the local cloud keeps to one file.",
    "restore": "Bring a backup into an empty data folder.",
    "bootstrap": "Make the first administrator.",
    "db": "The database's schema.",
    "pki": "The control plane's keys and certificates.",
}


def main() -> None:
    """Run the command line of this process."""
    ENTRIES.update(entries())
    sys.exit(run(app, sys.argv[1:], os.environ))


def entries() -> dict[str, Entry]:
    """What runs processes of this package, and so is not part of the command line that speaks only HTTP."""
    processes = {
        name: Entry(text, needs_server(name, _processes), inside=True, panel=_PANEL)
        for name, text in _PROCESSES.items()
    }
    keys = needs_server("secrets-key", module("penstock.processes.keys"))
    simulated = needs_server("sim", module("penstock.processes.sim"))
    return {
        **processes,
        "node": Entry(ENTRIES["node"].help, _nodes, panel=ENTRIES["node"].panel),
        "secrets-key": Entry("The master keys that secrets are encrypted under.", keys, panel=_PANEL),
        "sim": Entry("Simulated nodes, for trying a fleet on one machine.", simulated, panel=_PANEL),
    }


def _processes() -> typer.Typer:
    from penstock.processes import commands

    loaded = group("process", "Run Penstock itself.")
    commands.register(loaded)
    return loaded


def _nodes() -> typer.Typer:
    from penstock.cli import nodes

    loaded = group("node", ENTRIES["node"].help)
    loaded.registered_commands = [*nodes.app.registered_commands]
    loaded.registered_groups = [*nodes.app.registered_groups]
    command(
        loaded,
        "join",
        example="penstock node join --api https://cloud.example --name rack1-host7 --token - < token.txt",
    )(_join)
    return loaded


def _join(
    session: Session,
    api: Annotated[str, typer.Option("--api", help="The API's address.")],
    name: Annotated[str, typer.Option("--name", help="The node's name.")],
    token: Annotated[
        str,
        typer.Option(
            "--token",
            help=f"The token that `penstock node enroll` made; - reads it from standard input. Default: ${_TOKEN}.",
        ),
    ] = "",
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Give out simulated GPUs if this host has no NVIDIA driver.")
    ] = False,
) -> None:
    """Make this host a node, and serve as one until stopped: allocations, and functions where NATS can be reached."""
    if not installed():
        raise missing("penstock node join")
    from penstock.processes.up.programs import SIMULATED, SIMULATED_GPUS

    environ = {
        "PENSTOCK_AGENT_DATA_DIR": str(data_folder(session.flags.data, session.environ) / "node"),
        **({SIMULATED_GPUS: str(SIMULATED)} if simulated else {}),
        **session.environ,
        "PENSTOCK_API_URL": api,
        _TOKEN: _token(token, session.environ),
        "PENSTOCK_AGENT_NODE_NAME": name,
    }
    arguments = [sys.executable, "-P", "-m", "penstock.command", "serve", "node"]
    os.execve(sys.executable, arguments, environ)  # noqa: S606 - no shell is wanted


def _token(given: str, environ: Mapping[str, str]) -> str:
    """The token, preferably from where other users of the host do not see it."""
    token = sys.stdin.readline(_TOKEN_CHARACTERS_MAX).strip() if given == "-" else given or environ.get(_TOKEN, "")
    if not token:
        raise CliError(f"a token is needed: set {_TOKEN}, or say --token", field="token")
    return token


if __name__ == "__main__":
    main()

"""Commands that run Penstock itself: the whole cloud, one process of it, and the steps an operator takes by hand."""

import gc
import importlib
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Annotated, Final

import msgspec
import typer

from penstock.cli.errors import CONFLICT, SERVER, CliError
from penstock.cli.local import data_folder
from penstock.cli.output import ID, NEEDED, Column, Format, notice
from penstock.cli.session import Session, command, group
from penstock.kit import settings
from penstock.processes.localsettings import environ
from penstock.processes.told import told
from penstock.processes.up.folder import DataFolder, ProcessStatus

Port = Annotated[int | None, typer.Option(min=1, max=65535, show_default=False)]


class ProcessName(StrEnum):
    """Processes that can be run alone."""

    API = "api"
    GATEWAY = "gateway"
    WORKER = "worker"
    RELAY = "relay"
    BILLER = "biller"
    ACTIVATOR = "activator"
    AGENT = "agent"
    SIDECAR = "sidecar"
    NODE = "node"


class Listener(StrEnum):
    """The gateway's two listeners."""

    EDGE = "edge"
    LINK = "link"


class _DatabaseSettings(msgspec.Struct, frozen=True):
    database_url: str


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    command(app, "up", example="penstock up --detach")(_up)
    command(app, "status", example="penstock status -o json")(_status)
    command(app, "down", example="penstock down")(_down)
    command(app, "serve", example="penstock serve gateway --only link")(_serve)
    command(app, "bootstrap", example="penstock bootstrap")(_bootstrap)
    command(app, "backup", example="penstock backup monday.tar.gz")(_backup)
    command(app, "restore", example="penstock restore monday.tar.gz --data /srv/penstock")(_restore)
    database = group("db", "The database's schema.")
    command(database, "migrate", example="penstock db migrate")(_migrate)
    certificates = group("pki", "The control plane's keys and certificates.")
    command(certificates, "init", example="penstock pki init --dir /etc/penstock/pki --host gateway.example")(_pki_init)
    app.add_typer(database)
    app.add_typer(certificates)


def _up(
    session: Session,
    *,
    detach: Annotated[bool, typer.Option("--detach", help="Return when everything is ready.")] = False,
    address: Annotated[
        str | None, typer.Option(help="An address of this machine, for nodes and people elsewhere; default: loopback.")
    ] = None,
    api_port: Port = None,
    gateway_port: Port = None,
    link_port: Port = None,
    nats_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, show_default=False, help="Where sidecars of other nodes reach NATS, with TLS."),
    ] = None,
    supervise: Annotated[bool, typer.Option("--supervise", hidden=True)] = False,
) -> None:
    """Start the whole cloud here: Postgres, NATS, Temporal, all processes and one local node."""
    from penstock.processes.up import banner
    from penstock.processes.up import detach as detaching

    folder = _folder(session)
    usual = folder.path == data_folder(None, {**session.environ, "PENSTOCK_DATA": ""})

    def announce(ready: banner.Ready) -> None:
        # Whoever reads it may have gone, which must end nothing.
        with suppress(OSError):
            if not supervise:
                typer.echo(banner.text(ready, folder.path, usual_folder=usual, attached=not detach))

    with told():
        if not detach:
            from penstock.processes.up import run
            from penstock.processes.up.endpoints import Wanted

            wanted = Wanted(host=address, api=api_port, gateway=gateway_port, link=link_port, nats=nats_port)
            run.foreground(folder, wanted, session.environ, announce)
            return
        ports = {"api": api_port, "gateway": gateway_port, "link": link_port, "nats": nats_port}
        given = [part for name, port in ports.items() if port is not None for part in (f"--{name}-port", str(port))]
        given += ["--address", address] if address else []
        ready = detaching.detached(folder, ["up", "--supervise", "--data", str(folder.path), *given], session.environ)
    for note in ready.notes:
        typer.echo(note)
    announce(ready)


def _status(session: Session) -> None:
    """Show whether the local cloud is ready, and its processes."""
    from penstock.processes.up import control

    with told():
        found = control.status(_folder(session))
    if session.output.format is Format.JSON:
        session.output.json({name: getattr(found, name) for name in ("ready", "api", "gateway", "processes")})
    else:
        session.output.items(found.processes, PROCESS_COLUMNS)
        if session.output.format is Format.TABLE:
            typer.echo(f"ready at {found.api}" if found.ready else "not ready", err=not found.ready)
    raise typer.Exit(0 if found.ready else SERVER)


def _down(
    session: Session,
    *,
    timeout: Annotated[float, typer.Option(min=0, max=3600, help="Seconds until everything is killed.")] = 90.0,
) -> None:
    """Stop the local cloud; what it holds stays for the next start."""
    from penstock.processes.up import control

    with told():
        stopped = control.down(_folder(session), timeout_s=timeout)
    typer.echo("stopped" if stopped else "it was not running", err=True)


def _backup(
    session: Session,
    file: Annotated[Path, typer.Argument(help="Where to write it. It holds keys: keep it as safe as the install.")],
) -> None:
    """Write everything that the local cloud keeps to one file, while it runs."""
    from penstock.processes.up import backup

    with told():
        backup.create(_folder(session), file.absolute(), session.environ, notice)
    notice(f"backed up {_folder(session).path} to {file}")


def _restore(
    session: Session, file: Annotated[Path, typer.Argument(help="A file that `penstock backup` wrote.")]
) -> None:
    """Bring a backup into an empty data folder; `penstock up` then starts it."""
    from penstock.processes.up import backup

    with told():
        made = backup.restore(_folder(session), file.absolute(), notice)
    notice(f"restored the state of {made.created_at:%Y-%m-%d %H:%M:%SZ} to {_folder(session).path}")
    notice("keys, sessions and node certificates that were revoked since then are valid again: revoke them once more")


def _serve(
    _: Session,
    process: ProcessName,
    *,
    only: Annotated[Listener | None, typer.Option(help="Run one of the gateway's listeners.")] = None,
) -> None:
    """Run one process, with settings from PENSTOCK_… and the file in PENSTOCK_CONFIG."""
    if only is not None:
        if process is not ProcessName.GATEWAY:
            raise CliError("--only is for the gateway", field="only")
        os.environ["PENSTOCK_GATEWAY_ONLY"] = only.value
    with told():
        _import(f"penstock.processes.{process.value}").main()


def _import(name: str) -> ModuleType:
    """A process's module. What an import makes stays: to look for garbage in it, again and again, is a tenth of it."""
    gc.disable()
    module = importlib.import_module(name)
    gc.freeze()
    gc.enable()
    return module


def _migrate(session: Session) -> None:
    """Bring the database in PENSTOCK_DATABASE_URL, or the local instance's, to the newest schema."""
    from penstock.kit.migrate import migrate

    with told():
        migrate(settings.load(_DatabaseSettings, "db", environ(session)).database_url)


def _pki_init(
    _: Session,
    *,
    dir: Annotated[Path, typer.Option("--dir", help="Where to keep them.")],  # noqa: A002
    host: Annotated[
        list[str] | None, typer.Option("--host", help="A name or address of the gateways; may be repeated.")
    ] = None,
) -> None:
    """Make what is missing of the CA, the gateways' certificate and the keys that sign tasks."""
    from penstock.fleet import pki

    before = _written(dir)
    with told():
        try:
            pki.init(dir, host or ["127.0.0.1", "localhost"])
        except OSError as error:
            raise CliError(f"cannot write to {dir}: {error.strerror}", field="dir") from error
    for path in sorted(path for path, written_at in _written(dir).items() if before.get(path) != written_at):
        typer.echo(f"made {path}")


def _written(folder: Path) -> dict[Path, int]:
    """Certificates and keys, and when each was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.suffix in {".crt", ".key", ".pub"}}


def _bootstrap(
    session: Session,
    *,
    reset: Annotated[bool, typer.Option("--reset", help="Revoke the administrator's keys, make a new one.")] = False,
) -> None:
    """Make the default organisation and its administrator, and print the key: it is shown this one time."""
    import asyncio

    from penstock.processes.up import database

    with told():
        url = settings.load(_DatabaseSettings, "db", environ(session)).database_url
        key = asyncio.run(database.administrator(url, reset=reset))
    if key is None:
        raise CliError("there is an administrator already", exit_code=CONFLICT, next_step="--reset makes a new key")
    typer.echo(key)


def _folder(session: Session) -> DataFolder:
    return DataFolder(data_folder(session.flags.data, session.environ))


def _since(process: ProcessStatus) -> datetime | None:
    return datetime.fromisoformat(process.since) if process.since else None


PROCESS_COLUMNS: Final[Sequence[Column[ProcessStatus]]] = (
    Column("process", lambda process: process.name, rank=ID),
    Column("state", lambda process: process.state, rank=NEEDED),
    Column("pid", lambda process: process.pid),
    Column("restarts", lambda process: process.restarts),
    Column("since", _since),
    Column("metrics", lambda process: process.metrics or None),
    Column("last problem", lambda process: process.problem or None, rank=NEEDED),
)

"""Commands for the master keys of secrets: make them, add one, and put everything under the newest."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from penstock.cli.errors import CliError
from penstock.cli.output import notice
from penstock.cli.progress import progress
from penstock.cli.session import Session, command, group
from penstock.kit import db, settings
from penstock.notices import upkeep as notices
from penstock.processes.localsettings import environ
from penstock.processes.told import told
from penstock.secrets import keyring
from penstock.secrets.keyring import Keyring
from penstock.secrets.upkeep import Rewrapped, rewrap
from penstock.secrets.vault import Vault
from penstock.serverless import upkeep as serverless

Folder = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        help="The folder of the keys. Default: $PENSTOCK_SECRETS_DIR, or the local instance's.",
        show_default=False,
    ),
]


class _FolderSettings(msgspec.Struct, frozen=True):
    secrets_dir: str


class _Settings(msgspec.Struct, frozen=True):
    database_url: str
    secrets_dir: str


app = group("secrets-key", "The master keys that secrets are encrypted under.")


@command(app, "init", example="penstock secrets-key init --dir /etc/penstock/secrets")
def _init(session: Session, *, dir: Folder = None) -> None:  # noqa: A002
    """Make the folder and its first key; what is there stays."""
    _make(session, dir, keyring.init)


@command(app, "rotate", example="penstock secrets-key rotate")
def _rotate(session: Session, *, dir: Folder = None) -> None:  # noqa: A002
    """Add a master key: secrets that are set from now on use it. `rewrap` then moves the others."""
    _make(session, dir, keyring.rotate)


def _make(session: Session, given: Path | None, make: Callable[[Path], str | None]) -> None:
    with told():
        folder = given or Path(settings.load(_FolderSettings, "api", environ(session)).secrets_dir)
        try:
            made = make(folder)
        except OSError as error:
            raise CliError(f"cannot write to {folder}: {error.strerror}", field="dir") from error
    if made is not None:
        session.output.line(f"made {folder / made}.key")


@command(app, "rewrap", example="penstock secrets-key rewrap")
def _rewrap(session: Session) -> None:
    """Put the keys of all secrets, those of webhooks too, under the current master key, while everything runs."""
    with told():
        found = settings.load(_Settings, "api", environ(session))
        with progress("rewrapping") as report:
            done = asyncio.run(_run(found, lambda count: report(f"rewrapped {count}")))
    session.output.line(f"rewrapped {done.versions}")
    if done.left:
        raise CliError(f"{done.left} versions came in under another key meanwhile: run it again", code="not_done")
    for key_id in done.unused:
        notice(f"nothing needs {key_id} any more: {Path(found.secrets_dir) / key_id}.key can be deleted")


async def _run(found: _Settings, report: Callable[[int], None]) -> Rewrapped:
    ring = Keyring(Path(found.secrets_dir))
    async with db.connect(found.database_url, _no_hint, connections_max=1, name="rewrap") as database:
        webhooks = await notices.rewrap(database, Vault(ring), progress=report)
        functions = await serverless.rewrap(database, Vault(ring), progress=lambda n: report(webhooks.secrets + n))
        before = webhooks.secrets + functions.keys
        done = await rewrap(database, ring, progress=lambda count: report(before + count))
    used = webhooks.used | functions.used
    return Rewrapped(
        versions=before + done.versions,
        left=webhooks.left + functions.left + done.left,
        unused=[key_id for key_id in done.unused if key_id not in used],
    )


def _no_hint(_: str, __: bytes) -> None:
    """Nobody needs to know."""

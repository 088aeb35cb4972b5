"""The commands of operators who run the processes by hand."""

import os
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

from conftest import Servers
from penstock.kit import db
from penstock.secrets import store
from penstock.secrets.keyring import Keyring
from penstock.secrets.model import Place, seal


def penstock(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return subprocess.run(
        [sys.executable, "-m", "penstock.command", *arguments],
        env={**kept, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


async def test_a_new_database_gets_its_schema_and_one_administrator(servers: Servers) -> None:
    name = f"by_hand_{os.urandom(4).hex()}"
    conn = await asyncpg.connect(servers.admin_url)
    try:
        await conn.execute(f"create database {name}")
        url = servers.admin_url.rsplit("/", 1)[0] + f"/{name}"
        for _ in range(2):
            assert penstock("db", "migrate", PENSTOCK_DATABASE_URL=url).returncode == 0
        first = penstock("bootstrap", PENSTOCK_DATABASE_URL=url)
        assert first.stdout.startswith("psk_"), first.stderr
        second = penstock("bootstrap", PENSTOCK_DATABASE_URL=url)
        assert (second.returncode, second.stdout) == (5, "")
        reset = penstock("bootstrap", "--reset", PENSTOCK_DATABASE_URL=url)
        assert reset.stdout.startswith("psk_")
        assert reset.stdout != first.stdout
    finally:
        await conn.execute(f"drop database if exists {name} with (force)")
        await conn.close()


def test_pki_init_makes_what_is_missing_and_keeps_what_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "pki"
    assert penstock("pki", "init", "--dir", str(folder), "--host", "gateway.example").returncode == 0
    made = (folder / "ca.crt").read_bytes()
    assert (folder / "ca.key").stat().st_mode & 0o077 == 0
    assert penstock("pki", "init", "--dir", str(folder), "--host", "gateway.example").returncode == 0
    assert (folder / "ca.crt").read_bytes() == made


async def test_master_keys_are_made_rotated_and_rewrapped_by_hand(database_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    made = penstock("secrets-key", "init", "--dir", str(folder))
    assert made.stdout.startswith(f"made {folder}/smk_"), made.stderr
    assert penstock("secrets-key", "init", "--dir", str(folder)).stdout == ""
    [old] = folder.glob("*.key")
    await _set_a_secret(database_url, folder)
    given = {"PENSTOCK_DATABASE_URL": database_url, "PENSTOCK_SECRETS_DIR": str(folder)}
    assert penstock("secrets-key", "rotate", **given).returncode == 0
    done = penstock("secrets-key", "rewrap", **given)
    assert (done.returncode, done.stdout) == (0, "rewrapped 1\n"), done.stderr
    assert f"{old} can be deleted" in done.stderr
    assert penstock("secrets-key", "rewrap", **given).stdout == "rewrapped 0\n"


async def _set_a_secret(database_url: str, folder: Path) -> None:
    place = Place(project_id="prj_default", name="token", version=1)
    envelope = seal(place, b"value", Keyring(folder).current())
    async with db.connect(database_url, lambda *_: None) as database, database.transaction() as tx:
        await store.advance(tx, "prj_default", "token", by="usr_default")
        await store.insert_version(tx, place, envelope, size=5, fits_env=True, created_by="usr_default")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("serve", "relay"), "database_url"),
        (("serve", "api", "--only", "link"), "--only is for the gateway"),
        (("serve", "nothing"), "nothing"),
        (("db", "migrate"), "database_url"),
        (("secrets-key", "init"), "secrets_dir"),
        (("secrets-key", "rewrap"), "database_url"),
        (("up", "--api-port", "70000"), "--api-port"),
        (("up", "--api-port", "9000", "--link-port", "9000"), "must differ"),
        (("up", "--data", "/dev/null"), "/dev/null"),
        (("down", "--timeout", "-1"), "--timeout"),
    ],
)
def test_a_mistake_is_named_in_one_line_and_nothing_starts(
    tmp_path: Path, arguments: tuple[str, ...], names: str
) -> None:
    done = penstock(*arguments, PENSTOCK_DATA=str(tmp_path / "data"))
    assert done.returncode == 1, done.stderr
    assert names in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1

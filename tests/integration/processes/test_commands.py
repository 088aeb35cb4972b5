"""The commands of operators who run the processes by hand."""

import os
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

from conftest import Servers


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


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("serve", "relay"), "database_url"),
        (("serve", "api", "--only", "link"), "--only is for the gateway"),
        (("serve", "nothing"), "nothing"),
        (("db", "migrate"), "database_url"),
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

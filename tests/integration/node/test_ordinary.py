"""The same sandbox without root; and what happens where there is none."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from node_host import Host, request, tenant_folder, text_of
from penstock.kit.errors import Unavailable
from penstock.node import cgroups, runtimes, sandbox
from penstock.node.inventory import Simulated
from penstock.node.journal import Journal
from penstock.node.logs import Forwarder
from penstock.node.units import Units
from penstock.wire.tasks import SecretRef, UnitStop

_TESTS = Path(__file__).parents[2]


def test_an_ordinary_user_sandboxes_too(node_folder: Path) -> None:
    """As root, a user namespace gives the process another number and takes every capability over the host."""
    ordinary = ["unshare", "--user", "--map-user=1000", "--map-group=1000"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*ordinary, sys.executable, _TESTS / "node_ordinary.py", node_folder],
        cwd=_TESTS,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["euid"] != 0
    assert seen["sandbox"] == "bubblewrap"
    assert seen["owner"] == seen["euid"]
    assert seen["no_capabilities"]
    assert seen["outside"] != 0
    assert seen["clean"]
    assert seen["imported"] == "1.0\n"


def _prepare(folder: Path) -> tuple[Path, runtimes.Runtimes]:
    units = folder / "units"
    units.mkdir()
    units.chmod(0o711)
    return units, runtimes.prepare({"python:3": str(tenant_folder())}, folder / "work")


async def test_without_a_sandbox_production_refuses_and_development_warns(
    node_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    units_folder, images = _prepare(node_folder)
    monkeypatch.setattr(sandbox, "find_binary", lambda: None)
    with pytest.raises(Unavailable, match="production"):
        sandbox.open_driver(node_folder / "work", units_folder, images, uid=None, production=True)
    driver = sandbox.open_driver(node_folder / "work", units_folder, images, uid=None, production=False)
    assert driver.name == "plain"
    printed = capsys.readouterr()
    assert "NOT SANDBOXED" in printed.out + printed.err


async def test_plain_processes_run_and_are_cleared_away(node_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    units_folder, images = _prepare(node_folder)
    monkeypatch.setattr(sandbox, "find_binary", lambda: None)
    journal = Journal(node_folder / "journal.db")
    logs, inventory = Forwarder(), Simulated("nod_test", 1)
    units = Units(
        folder=units_folder,
        journal=journal,
        driver=sandbox.open_driver(node_folder / "work", units_folder, images, uid=None, production=False),
        runtimes=images,
        inventory=inventory,
        groups=cgroups.Groups({}, 1),
        logs=logs,
    )
    host = Host(node_folder, journal, units, logs, inventory)
    await units.start(request("alc_plain", command=["sh", "-c", "setsid sleep 1000 & sleep 1000"]))
    assert (await host.run("alc_plain", "echo", "hello")).out == "hello\n"
    await asyncio.sleep(0.2)
    proof = await units.stop(UnitStop(unit_id="alc_plain", gpu_uuids=[], grace_s=0.2))
    assert proof.clean
    await units.start(request("alc_stock", stock=True))
    secrets, values = [SecretRef(name="key", version=1)], {"key": b"open"}
    await host.hand_over("alc_stock", "sh", "-c", "cat $PENSTOCK_SECRETS/key", secrets=secrets, values=values)
    assert text_of((await host.ended("alc_stock")).lines, "stdout") == "open\n"
    assert (await units.stop(UnitStop(unit_id="alc_stock", gpu_uuids=[], grace_s=0))).clean
    assert not (units_folder / "alc_stock").exists()
    await host.close()

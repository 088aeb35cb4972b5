"""Backup and restore of an install: what was there comes back, what went on since is not believed."""

import asyncio
import tarfile
from pathlib import Path

import pytest

from chaos.invariants import fetch
from e2e.cloud import Cloud

pytestmark = pytest.mark.timeout(300)


def test_an_install_comes_back_from_its_backup(cloud: Cloud, tmp_path: Path) -> None:
    cloud.up()
    file = tmp_path / "backup.tar.gz"
    kept = cloud.json("alloc", "create", "--sku", "g1.1", "--wait", timeout_s=90)["id"]
    project = cloud.json("project", "create", "kept")["id"]
    cloud.ok("backup", str(file), timeout_s=120)
    assert file.stat().st_mode & 0o777 == 0o600
    assert cloud.run("backup", str(file)).returncode == 5
    later = cloud.json("project", "create", "later")["id"]
    cloud.down()

    again = Cloud(cloud.data.with_name("restored"))
    again.ok("restore", str(file), timeout_s=120)
    assert again.run("restore", str(file)).returncode == 5
    again.up()
    try:
        projects = {item["id"] for item in again.json("project", "list")["items"]}
        assert project in projects
        assert later not in projects
        # The unit is gone with the old install's node: the allocation that the backup shows as active ends by itself.
        assert again.json("alloc", "show", kept)["sku"] == "g1.1"
        # Its node may have seen any fence since the backup; the restored one is above them all.
        [row] = asyncio.run(fetch(again, f"select fence from compute.allocations where id = '{kept}'"))
        assert row["fence"] > 10**9
        fresh = again.json("alloc", "create", "--sku", "g1.1", "--wait", timeout_s=90)["id"]
        assert again.ok("alloc", "exec", fresh, "--", "echo", "back") == "back\n"
        assert "install.restore" in {item["action"] for item in again.json("audit", "list")["items"]}
    finally:
        again.down()


@pytest.mark.parametrize("content", [b"", b"rubbish", "empty"])
def test_what_is_no_backup_is_refused(tmp_path: Path, content: bytes | str) -> None:
    file = tmp_path / "bad.tar.gz"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        with tarfile.open(file, "w:gz"):
            pass
    refused = Cloud(tmp_path / "data").run("restore", str(file))
    assert (refused.returncode, "field=file" in refused.stderr) == (1, True)
    assert refused.stdout == ""

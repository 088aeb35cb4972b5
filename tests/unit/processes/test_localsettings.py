"""Operators' commands without settings of their own take those of the local instance, while it runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from penstock.cli.session import Session
from penstock.processes.localsettings import environ
from penstock.processes.up.folder import DataFolder, Instance

INSTANCE = Instance(api="a", gateway="g", key="k", pid=1, database_url="postgresql://here", secrets_dir="/here")


def _session(folder: Path, **given: str) -> Session:
    fake: Any = SimpleNamespace(environ=given, flags=SimpleNamespace(data=str(folder)))
    return cast("Session", fake)


def test_a_running_instance_says_where_things_are(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    folder.save_instance(INSTANCE)
    with folder.locked():
        found = environ(_session(tmp_path))
        assert (found["PENSTOCK_DATABASE_URL"], found["PENSTOCK_SECRETS_DIR"]) == ("postgresql://here", "/here")
        elsewhere = environ(_session(tmp_path, PENSTOCK_DATABASE_URL="postgresql://there"))
        assert elsewhere == {"PENSTOCK_DATABASE_URL": "postgresql://there"}
        assert environ(_session(tmp_path, PENSTOCK_SECRETS_DIR="/own"))["PENSTOCK_SECRETS_DIR"] == "/own"


def test_one_that_does_not_run_says_nothing(tmp_path: Path) -> None:
    DataFolder(tmp_path).save_instance(INSTANCE)
    assert environ(_session(tmp_path)) == {}

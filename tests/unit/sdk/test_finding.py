"""A client without arguments finds the instance as the command does, and fails with the same words."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import profiles
from penstock.cli.app import app, run
from penstock.cli.profiles import ConfigFile, Profile
from penstock.sdk.client import AsyncClient, Client
from penstock.sdk.errors import NotConfigured

KINDS = pytest.mark.parametrize("kind", [Client, AsyncClient])
NAMES = ("API_URL", "API_KEY", "PROJECT", "PROFILE", "GATEWAY_URL", "CONFIG_FILE")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in NAMES:
        monkeypatch.delenv(f"PENSTOCK_{name}", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_DATA", str(tmp_path / "data"))
    return tmp_path


def target(client: Any) -> tuple[str, str | None, str | None, str | None]:
    found = client.executor.target
    return found.api_url, found.key, found.project, found.gateway_url


@KINDS
def test_variables_then_profile_then_local_instance(kind: type, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "data").mkdir()
    values = {"api": "http://127.0.0.1:1", "gateway": "http://127.0.0.1:2", "key": "psk_local", "pid": 1}
    (home / "data" / "instance.json").write_text(json.dumps(values))
    assert target(kind()) == ("http://127.0.0.1:1", "psk_local", None, "http://127.0.0.1:2")
    stored = Profile("https://a.example", None, "psk_stored", "prj_default")
    profiles.write(home / ".config" / "penstock" / "config.toml", ConfigFile({"default": stored}))
    assert target(kind()) == ("https://a.example", "psk_stored", "prj_default", None)
    monkeypatch.setenv("PENSTOCK_API_URL", "https://b.example")
    monkeypatch.setenv("PENSTOCK_API_KEY", "psk_env")
    assert target(kind())[:2] == ("https://b.example", "psk_env")


@KINDS
def test_arguments_come_before_what_is_found(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_URL", "https://b.example")
    assert target(kind(key="psk_given", project="prj_default")) == (
        "https://b.example",
        "psk_given",
        "prj_default",
        None,
    )
    monkeypatch.setenv("PENSTOCK_API_KEY", "psk_env")
    assert target(kind("https://c.example"))[:2] == ("https://c.example", "psk_env")
    assert target(kind("https://c.example", None))[:2] == ("https://c.example", None)


@KINDS
def test_without_any_it_fails_with_the_words_of_the_command(kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotConfigured) as caught:
        kind()
    assert run(app, ["whoami"], os.environ) != 0
    assert capsys.readouterr().err.startswith(f"error: {caught.value.message} (code={caught.value.code}")


@KINDS
def test_a_stored_key_goes_only_to_its_own_server(kind: type, home: Path) -> None:
    stored = Profile("https://a.example", None, "psk_stored", None)
    profiles.write(home / ".config" / "penstock" / "config.toml", ConfigFile({"default": stored}))
    with pytest.raises(NotConfigured, match=r"no key for https://other\.example"):
        kind("https://other.example")


def test_nothing_is_looked_for_where_everything_is_said() -> None:
    probe = (
        "import sys; from penstock import Client; Client('https://a.example', 'psk_x')\n"
        "sys.exit('penstock.cli' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", probe], timeout=30).returncode == 0

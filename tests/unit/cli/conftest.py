"""The real command line, and a server that it can be pointed at."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import scripted_api
from scripted_api import ScriptedApi

KEY = "psk_" + "k" * 43


@dataclass
class Cli:
    """`penstock` in a process of its own, with an environment of its own."""

    home: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def config(self) -> Path:
        """Where the configuration file is."""
        return self.home / ".config" / "penstock" / "config.toml"

    def environ(self) -> dict[str, str]:
        """Nothing of the machine's but what a program needs to start."""
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        return {**kept, "HOME": str(self.home), "PENSTOCK_DATA": str(self.home / "data"), **self.env}

    def command(self, *arguments: str) -> list[str]:
        """The command line."""
        return [sys.executable, "-m", "penstock.command", *arguments]

    def run(
        self, *arguments: str, env: Mapping[str, str] | None = None, stdin: str = ""
    ) -> "subprocess.CompletedProcess[str]":
        """Run to the end; a traceback is never an answer."""
        done = subprocess.run(
            self.command(*arguments),
            env={**self.environ(), **(env or {})},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def fails(self, code: int, *arguments: str, says: str, **options: Any) -> str:
        """Run what must fail, with one line that says so."""
        done = self.run(*arguments, **options)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        assert says in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    def logged_in(self, api: ScriptedApi) -> None:
        """Point it at a server."""
        self.env |= {"PENSTOCK_API_URL": api.url, "PENSTOCK_GATEWAY_URL": api.url, "PENSTOCK_API_KEY": KEY}

    def write_config(self, text: str, mode: int = 0o600) -> None:
        """Put a configuration file there."""
        self.config.parent.mkdir(parents=True, exist_ok=True)
        self.config.write_text(text)
        self.config.chmod(mode)

    def source(self, name: str, *options: str) -> tuple[str | None, str]:
        """A value and its source by `config show`."""
        shown = json.loads(self.run("config", "show", *options, "-o", "json").stdout)
        return shown[name]["value"], shown[name]["source"]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with scripted_api.serve() as running:
        yield running

"""`penstock node join` takes its token from where other users of the host do not see it."""

import io
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from penstock import command
from penstock.cli.app import ENTRIES, app, run

JOIN = ("node", "join", "--api", "https://cloud.example", "--name", "n1")
TOKEN = "PENSTOCK_AGENT_ENROLMENT_TOKEN"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence[str], Mapping[str, str]]]:
    """Arguments and environments of what would have been started."""
    calls: list[tuple[Sequence[str], Mapping[str, str]]] = []

    def note(_: str, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        calls.append((arguments, environ))

    monkeypatch.setattr(os, "execve", note)
    for name, entry in command.entries().items():
        monkeypatch.setitem(ENTRIES, name, entry)
    return calls


@pytest.mark.parametrize("way", ["argument", "environment", "stdin"])
def test_a_token_comes_in_three_ways(
    way: str,
    started: list[tuple[Sequence[str], Mapping[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    more = {"argument": ("--token", "ent_x"), "environment": (), "stdin": ("--token", "-")}[way]
    environ = {"PENSTOCK_DATA": str(tmp_path)} | ({TOKEN: "ent_x"} if way == "environment" else {})
    monkeypatch.setattr(sys, "stdin", io.StringIO("ent_x\n" if way == "stdin" else ""))
    assert run(app, [*JOIN, *more], environ) == 0
    [(arguments, given)] = started
    assert given[TOKEN] == "ent_x"
    assert "ent_x" not in arguments


def test_without_a_token_nothing_starts(
    started: list[tuple[Sequence[str], Mapping[str, str]]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(app, JOIN, {"PENSTOCK_DATA": str(tmp_path)}) == 1
    assert started == []
    assert TOKEN in capsys.readouterr().err


def test_an_interrupt_while_the_command_line_is_imported_is_quiet() -> None:
    code = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from penstock.entry import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")

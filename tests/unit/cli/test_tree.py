"""Every command of the tree, as typer builds it."""

import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer

from penstock import command
from penstock.cli.app import app, run
from penstock.cli.errors import MEANINGS
from scripted_api import ScriptedApi

from .conftest import KEY, Cli


def leaves(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    context = typer.Context(group)
    for name in group.list_commands(context):
        child = group.get_command(context, name)
        if hasattr(child, "commands"):
            yield from leaves(child, (*path, name))
        else:
            yield (*path, name)


command.ENTRIES.update(command.entries())
COMMANDS = sorted(leaves(typer.main.get_command(app)))


def test_the_tree_is_not_empty() -> None:
    assert {("alloc", "create"), ("up",), ("node", "join"), ("auth", "login"), ("login",)} <= set(COMMANDS)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, [*path, "--help"], {}) == 0
    shown = capsys.readouterr().out
    assert run(app, [*path, "-h"], {}) == 0
    assert capsys.readouterr().out == shown
    assert "Example:\n    " in shown
    assert "penstock " in shown.partition("Example:")[2]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_takes_the_global_options(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-o", "csv", "--no-heading", "-p", "x", "--profile", "x", "--api-url", "x", "--no-input", "--data", "x"]
    assert run(app, [*options, *path, *options, "--help"], {}) == 0


def test_commands_are_shown_in_groups_and_exit_codes_below(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["-h"], {}) == 0
    shown = capsys.readouterr().out
    titles = ("Use the cloud", "Log in and manage access", "Operate a cloud", "Run a cloud on this machine")
    places = [shown.index(f"\n{title}:\n") for title in (*titles, "  Exit codes")]
    assert places == sorted(places)
    assert "Commands:" not in shown
    guide = (Path(__file__).parents[3] / "docs/guides/command-line.md").read_text()
    for code, meaning in MEANINGS.items():
        assert f"{code:<4} {meaning}" in shown
        assert f"| {code} | {meaning} |" in guide


@pytest.mark.parametrize("arguments", [[], ["alloc"], ["--help"], ["alloc", "--help"]])
def test_a_group_alone_shows_its_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, arguments, {}) == 0
    shown = capsys.readouterr().out
    assert "Commands:" in shown or "Use the cloud:" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["aloc"], "Did you mean 'alloc'"),
        (["alloc", "creat"], "Did you mean 'create'"),
        (["alloc", "create"], "Missing option '--sku'"),
        (["alloc", "create", "--sku", "g", "--gpus", "many"], "--gpus"),
        (["whoami", "--frob"], "No such option: --frob"),
        (["-o", "xml", "whoami"], "'xml' is not one of"),
        (["key", "revoke"], "Missing argument"),
        (["completion", "show"], "name your shell: bash, zsh, fish"),
        (["completion", "show", "tcsh"], "'tcsh' is not one of"),
    ],
)
def test_usage_errors_are_one_line_and_exit_with_1(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, arguments, {}) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "\\x0a" not in error
    assert error.count("\n") == 1


def test_help_needs_nothing_heavy() -> None:
    probe = (
        "import sys; from penstock import command; sys.argv = ['penstock', '--help']\n"
        "try: command.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'aiohttp', 'msgspec', 'pydantic', 'rich', 'asyncio', 'asyncpg', 'temporalio', 'litestar'}\n"
        "sys.exit(f'imported: {heavy & set(sys.modules)}' if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


#: What a plain command has no use for; each of them takes longer to import than its part of the promised start.
HEAVY = (
    *("aiohttp", "asyncio", "concurrent.futures", "csv", "email", "http.client", "http.server", "importlib.metadata"),
    *("logging", "pydantic", "rich", "ssl", "tarfile", "urllib.request", "websockets"),
)


@pytest.mark.parametrize("line", ["alloc list -o json", "whoami -o json", "fn list -o json", "sku list -o json"])
def test_a_plain_command_imports_little(line: str, cli: Cli, api: ScriptedApi) -> None:
    probe = (
        "import sys; from penstock import command\n"
        f"sys.argv = ['penstock', *{line.split()}]\n"
        "try: command.main()\n"
        "except SystemExit as ended: assert ended.code in (0, 4), ended.code\n"
        f"found = sorted(set({HEAVY}) & set(sys.modules))\n"
        "sys.exit(f'imported: {found}' if found else 0)"
    )
    env = {**cli.environ(), "PENSTOCK_API_URL": api.url, "PENSTOCK_API_KEY": KEY}
    done = subprocess.run([sys.executable, "-c", probe], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(api.seen) == 1


def test_the_client_is_imported_without_modules_of_one_system() -> None:
    """As on macOS and Windows, and in an environment without the servers."""
    probe = (
        "import pkgutil, sys\n"
        "absent = ('fcntl', 'grp', 'pwd', 'pty', 'resource', 'termios', 'tty', 'uvloop', 'aiohttp', 'litestar')\n"
        "sys.modules |= dict.fromkeys(absent)\n"
        "import importlib, penstock.cli, penstock.sdk, penstock.wire, penstock.command, penstock.program\n"
        "for package in (penstock.cli, penstock.sdk, penstock.wire):\n"
        "    for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(found.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_completion_knows_commands_and_options() -> None:
    def complete(line: str) -> str:
        environ = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        done = subprocess.run(
            [sys.executable, "-m", "penstock.command"], env=environ, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert complete("penstock al").split() == ["alloc"]
    assert "create" in complete("penstock alloc ").split()
    assert "--wait-capacity" in complete("penstock alloc create --wait").split()


def test_the_shell_is_taken_from_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["completion", "show"], {"SHELL": "/usr/bin/fish"}) == 0
    assert "complete --command penstock" in capsys.readouterr().out


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["--version"], {}) == 0
    assert capsys.readouterr().out == f"penstock {metadata.version('penstock')}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_exist(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["completion", "show", shell], {}) == 0
    assert "_PENSTOCK_COMPLETE" in capsys.readouterr().out


def test_making_keys_says_what_was_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["pki", "init", "--dir", str(tmp_path), "--host", "gateway.example"]
    assert run(app, line, {}) == 0
    made = [Path(text.removeprefix("made ")) for text in capsys.readouterr().out.splitlines()]
    assert {path.name for path in made} > {"ca.crt", "ca.key", "gateway.crt", "gateway.key"}
    assert all(path.is_file() for path in made)
    assert run(app, line, {}) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("line", [["db", "migrate"], ["bootstrap"]])
def test_a_missing_setting_is_named(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, line, {}) == 1
    assert "set PENSTOCK_DATABASE_URL" in capsys.readouterr().err

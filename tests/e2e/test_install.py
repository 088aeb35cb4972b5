"""The package as people elsewhere install it: from a wheel, without the servers."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.cloud import Cloud
from waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
PACKAGES_MAX = 15
BYTES_MAX = 40 << 20
INSTALL_S_MAX = 10.0
UV = str(Path(sys.prefix) / "bin" / "uv")


@dataclass(frozen=True)
class Thin:
    """A fresh environment with the wheel and what it depends on."""

    folder: Path
    took_s: float

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.folder / "bin" / "python")

    def run(self, *words: str, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        """Run a program of the environment, as somebody who has set nothing else."""
        home = self.folder.parent / "home"
        home.mkdir(exist_ok=True)
        given = {"PATH": os.environ["PATH"], "HOME": str(home), **(env or {})}
        program = [str(self.folder / "bin" / words[0]), *words[1:]]
        return subprocess.run(program, env=given, cwd=home, capture_output=True, text=True, timeout=60)


def uv(*words: str) -> str:
    done = subprocess.run([UV, *words], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def thin(tmp_path_factory: pytest.TempPathFactory) -> Thin:
    """In a path with a space, as many are."""
    folder = tmp_path_factory.mktemp("thin client")
    uv("build", "--quiet", "--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(folder))
    [wheel] = folder.glob("*.whl")
    uv("venv", "--quiet", "--python", sys.executable, str(folder / "env"))
    began = time.monotonic()
    into = ("--python", str(folder / "env" / "bin" / "python"))
    uv("pip", "install", "--quiet", *into, "--constraint", "requirements.lock", str(wheel))
    return Thin(folder / "env", time.monotonic() - began)


def test_it_is_small(thin: Thin) -> None:
    found = json.loads(uv("pip", "list", "--format", "json", "--python", thin.python))
    assert len(found) <= PACKAGES_MAX, [package["name"] for package in found]
    files = [path.lstat().st_size for path in (thin.folder / "lib").rglob("*") if path.is_file()]
    assert sum(files) <= BYTES_MAX
    assert thin.took_s <= INSTALL_S_MAX


def test_it_can_be_imported_and_lists_every_command(thin: Thin) -> None:
    assert thin.run("python", "-c", "import penstock, penstock.sdk; penstock.Client; penstock.App").returncode == 0
    listed = thin.run("penstock", "--help")
    assert listed.returncode == 0, listed.stderr
    assert all(f"\n  {name} " in listed.stdout for name in ("alloc", "fn", "up", "serve", "backup", "db", "sim"))


@pytest.mark.parametrize(
    "line",
    [
        ["up", "--detach"],
        ["up", "--help"],
        ["status"],
        ["serve", "api"],
        ["backup", "x.tar.gz"],
        ["db", "migrate"],
        ["pki", "init"],
        ["sim", "up", "3"],
        ["secrets-key", "rewrap"],
        ["node", "join", "--api", "https://cloud.example", "--name", "n", "--token", "t"],
    ],
)
def test_what_needs_the_servers_says_so(thin: Thin, line: list[str]) -> None:
    done = thin.run("penstock", *line)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1
    assert "needs the servers" in done.stderr
    assert "pip install 'penstock-….whl[server,embedded]'" in done.stderr


def test_an_unknown_command_is_still_told_from_a_missing_one(thin: Thin) -> None:
    done = thin.run("penstock", "allok")
    assert (done.returncode, "Did you mean 'alloc'" in done.stderr) == (1, True)


def test_it_rents_runs_a_command_and_gives_back(thin: Thin, stack: Cloud) -> None:
    env = {"PENSTOCK_API_URL": stack.api, "PENSTOCK_API_KEY": stack.key}
    made = thin.run("penstock", "alloc", "create", "--sku", "g1.1", "--wait", "-o", "json", env=env)
    assert made.returncode == 0, made.stderr
    allocation = json.loads(made.stdout)["id"]
    said = thin.run("penstock", "alloc", "exec", allocation, "--", "echo", "from the unit", env=env)
    assert (said.returncode, said.stdout) == (0, "from the unit\n"), said.stderr
    program = (
        "from penstock import Client\n"
        "with Client() as client:\n"
        f"    print(client.allocations.exec('{allocation}', ['echo', 'by the SDK']).stdout.decode(), end='')\n"
        f"    client.allocations.release('{allocation}')\n"
    )
    done = thin.run("python", "-c", program, env=env)
    assert (done.returncode, done.stdout) == (0, "by the SDK\n"), done.stderr


def blocks(language: str) -> list[str]:
    """What the README prints in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def test_the_readme_works_as_printed(stack: Cloud, tmp_path: Path) -> None:
    """Pasted into a shell in the folder that has `.venv`."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    _, rent, run_it, deploy = blocks("sh")
    (tmp_path / "hello").mkdir()
    for name, text in zip(("rent.py", "hello/hello.py"), blocks("python"), strict=True):
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["sh", "-e", "-c", rent + run_it + deploy],
        env=stack.environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert printed[0] == "1"
    assert any("8000" in line for line in printed)
    assert printed[-1] == "hello, Ada"
    # The cloud is shared: its worker would stay for minutes.
    stack.ok("fn", "delete", "hello-greet")
    deadline = time.monotonic() + PATIENCE_S
    while stack.json("alloc", "list")["items"]:
        assert time.monotonic() < deadline, "its worker stays"
        time.sleep(0.2)

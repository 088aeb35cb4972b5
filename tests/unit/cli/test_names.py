"""Names in the place of ids, several at once, and what the tab key completes."""

import json
import os
import pty
import select
import struct
import subprocess
import time
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ
from typing import Any

import pytest

from penstock.cli import app as tree
from penstock.cli import tables
from penstock.kit.ids import new_id
from scripted_api import ScriptedApi, error_answer, json_answer

from .answers import allocation, page
from .cases import NOD, NODE, PRJ, PROJECT, SKU
from .conftest import Cli


def run(cli: Cli, *line: str) -> int:
    return tree.run(tree.app, list(line), cli.environ())


def named(state: str, name: str = "train") -> dict[str, Any]:
    return allocation(state, new_id("alc")) | {"name": name}


def test_an_allocation_is_meant_by_its_name_and_what_lives_before_what_ended(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    living, ended = named("active"), named("released")
    api.on("GET", "/allocations", json_answer(page([living, ended])))
    api.on("GET", f"/allocations/{living['id']}", json_answer(living))
    api.on("GET", f"/allocations/{ended['id']}", json_answer(ended))
    assert run(cli, "alloc", "show", "train") == 0
    assert living["id"] in capfd.readouterr().out
    assert api.seen[0].query["name"] == "train"
    api.on("GET", "/allocations", json_answer(page([ended])))
    assert run(cli, "alloc", "show", "train") == 0
    assert ended["id"] in capfd.readouterr().out


def test_a_name_of_several_lists_them_and_a_name_of_none_says_where_to_look(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    both = [named("active"), named("provisioning")]
    api.on("GET", "/allocations", json_answer(page(both)))
    assert run(cli, "alloc", "release", "train") == 1
    error = capfd.readouterr().err
    assert all(f"{it['id']} ({it['state']})" in error for it in both)
    api.on("GET", "/allocations", json_answer(page([])))
    assert run(cli, "alloc", "release", "train") == 4
    assert "no allocation train; see `penstock alloc list --all`" in capfd.readouterr().err
    assert run(cli, "alloc", "release", "train", "-o", "json") == 4
    error = json.loads(capfd.readouterr().err)["error"]
    assert (error["message"], error["next"]) == ("no allocation train", "see `penstock alloc list --all`")


def test_nodes_and_projects_have_names(api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    cli.logged_in(api)
    api.on("GET", "/nodes", json_answer(page([NODE])))
    api.on("POST", f"/nodes/{NOD}/cordon", json_answer(NODE))
    assert run(cli, "node", "cordon", "rack1") == 0
    api.on("GET", "/projects", json_answer(page([PROJECT])))
    api.on("GET", "/skus", json_answer(page([])))
    assert run(cli, "-p", "research", "sku", "list") == 0, capfd.readouterr().err
    assert api.seen[-1].headers["penstock-project"] == PRJ
    assert "penstock-project" not in api.seen[-2].headers


def test_each_of_several_is_tried_and_the_first_failure_is_the_exit_code(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    for name in ("a", "c"):
        api.on("DELETE", f"/functions/{name}", json_answer(None, 204))
    api.on("DELETE", "/functions/b", error_answer(404, "not_found", "no function b in project prj_default"))
    assert run(cli, "fn", "delete", "a", "b", "c") == 4
    told = capfd.readouterr().err.splitlines()
    assert (told[0], told[2]) == ("deleted function a", "deleted function c")
    assert told[1].startswith(
        "error: no function b in project prj_default; see `penstock fn list`; `penstock fn deploy`"
    )


def test_the_list_shows_what_lives_unless_all_is_asked_for(api: ScriptedApi, cli: Cli) -> None:
    cli.logged_in(api)
    api.on("GET", "/allocations", json_answer(page([])))
    for line in (["alloc", "list"], ["alloc", "list", "--all"], ["alloc", "list", "--state", "released"]):
        assert run(cli, *line) == 0
    assert [seen.query.get("ended") for seen in api.seen] == ["false", None, None]


def test_a_new_offer_is_put_where_there_is_none_to_change(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    api.on("PUT", "/skus/h1", json_answer(SKU))
    assert run(cli, "sku", "set", "h1", "--price", "1") == 4
    assert "there is no SKU h1 yet; a new one needs --gpu-model, --memory, --cpus" in capfd.readouterr().err
    new = ["sku", "set", "h1", "--gpu-model", "*", "--price", "1", "--memory", "1", "--cpus", "1"]
    assert run(cli, *new) == 0
    assert json.loads(api.seen[-1].body)["gpu_counts"] == [1]
    assert run(cli, "sku", "set", "h1") == 1


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_a_table_fits_its_terminal(api: ScriptedApi, cli: Cli, width: int) -> None:
    cli.logged_in(api)
    found = [named("active", name) | {"reason": "because " * 30} for name in ("train", "名前" * 12)]
    api.on("GET", "/allocations", json_answer(page(found)))
    shown = on_terminal(cli, ["alloc", "list"], width)
    rows = [line for line in shown if line and "too narrow" not in line]
    assert len(rows) == 3, shown
    assert all(tables.width(line) <= width for line in rows), shown
    assert all(it["id"] in shown[number + 1] for number, it in enumerate(found))


def on_terminal(cli: Cli, line: list[str], width: int) -> list[str]:
    """What a command writes to a terminal of so many columns, without colours."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    child = subprocess.Popen(cli.command(*line), env=cli.environ(), stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    text = b""
    until = time.monotonic() + 60
    while time.monotonic() < until and select.select([ours], [], [], 60)[0]:
        try:
            text += os.read(ours, 65536)
        except OSError:
            break
    os.close(ours)
    assert child.wait(30) == 0
    return text.decode().replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()


def completed(cli: Cli, line: str) -> list[str]:
    environ = {
        **cli.environ(),
        "_PENSTOCK_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
    }
    done = subprocess.run(cli.command(), env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_the_tab_key_completes_values(api: ScriptedApi, cli: Cli) -> None:
    cli.logged_in(api)
    it = named("active")
    api.on("GET", "/allocations", json_answer(page([it])))
    api.on("GET", "/nodes", json_answer(page([NODE])))
    api.on("GET", "/skus", json_answer(page([SKU])))
    assert completed(cli, "penstock alloc release tr") == ["train"]
    assert completed(cli, "penstock alloc show alc_") == [it["id"]]
    assert completed(cli, "penstock node drain ra") == ["rack1"]
    assert completed(cli, "penstock alloc create --sku g") == [SKU["name"]]
    assert completed(cli, "penstock alloc list --state act") == ["active"]
    assert api.seen[0].query["ended"] == "false"


def test_the_tab_key_is_silent_and_quick_when_nobody_answers(cli: Cli) -> None:
    assert completed(cli, "penstock alloc release tr") == []
    cli.env |= {"PENSTOCK_API_URL": "http://127.0.0.1:1", "PENSTOCK_API_KEY": "psk_x"}
    assert completed(cli, "penstock alloc release tr") == []


def test_the_tab_key_completes_profiles(cli: Cli, tmp_path: Path) -> None:
    cli.write_config('[profiles.staging]\napi_url = "https://a.example"\n[profiles.prod]\n')
    assert completed(cli, "penstock --profile st") == ["staging"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('curent_profile = "x"', "there is no key curent_profile; did you mean current_profile?"),
        ('[profiles.a]\napi_ur = "https://a"', "there is no key profiles.a.api_ur; did you mean api_url?"),
        ("[zzz]", "there is no key zzz; there are profiles, current_profile"),
    ],
)
def test_a_key_of_the_file_that_nobody_reads_is_refused(cli: Cli, text: str, says: str) -> None:
    cli.write_config(text)
    cli.fails(1, "whoami", says=says)

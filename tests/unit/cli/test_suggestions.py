"""What is unknown is named together with what was probably meant."""

import json

import pytest

from penstock.cli import app as tree
from scripted_api import ScriptedApi, error_answer, json_answer

from .answers import page
from .cases import ALC, NODE, PROJECT, SKU
from .conftest import Cli
from .functioncases import FUNCTION
from .test_names import named

UNKNOWN_SKU = error_answer(400, "compute.unknown_sku", "there is no SKU g11; there are g1.1", "sku")


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        (["fn", "invoke", "hello-great"], "hello-greet"),
        (["fn", "show", "hello-greeet"], "hello-greet"),
        (["fn", "delete", "helo-greet"], "hello-greet"),
        (["alloc", "create", "--sku", "g11"], "g1.1"),
        (["sku", "show", "g11"], "g1.1"),
        (["node", "drain", "rak1"], "rack1"),
        (["alloc", "release", "tran"], "train"),
        (["alloc", "exec", "tran", "--", "true"], "train"),
        (["-p", "reserch", "alloc", "list"], "research"),
    ],
)
def test_an_unknown_name_comes_with_the_nearest(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str], line: list[str], meant: str
) -> None:
    cli.logged_in(api)
    functions = [FUNCTION | {"name": name} for name in ("shop-price", "hello-greet")]
    api.on("GET", "/functions", json_answer(page(functions)))
    api.on("GET", "/skus", json_answer(page([SKU, SKU | {"name": "mps.1"}])))
    api.on("GET", "/nodes", json_answer(page([NODE])))
    api.on("GET", "/projects", json_answer(page([{**PROJECT, "name": name} for name in ("default", "research")])))
    api.on("GET", "/allocations", json_answer(page([named("active", "eval"), named("active", "train")])))
    api.on("POST", "/allocations", UNKNOWN_SKU)
    assert tree.run(tree.app, line, cli.environ()) in (1, 4)
    assert f"did you mean {meant}?" in capfd.readouterr().err
    assert tree.run(tree.app, [*line[:2], "-o", "json", *line[2:]], cli.environ()) in (1, 4)
    told = json.loads(capfd.readouterr().err.splitlines()[-1])
    assert told["error"]["next"].startswith(f"did you mean {meant}?")


def test_no_other_id_is_suggested_for_an_id(api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    cli.logged_in(api)
    api.on("GET", "/allocations", json_answer(page([named("active", "train")])))
    assert tree.run(tree.app, ["alloc", "release", ALC], cli.environ()) == 4
    assert "did you mean" not in capfd.readouterr().err


def test_nothing_is_suggested_for_what_resembles_nothing(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    api.on("GET", "/functions", json_answer(page([FUNCTION | {"name": "hello-greet"}])))
    assert tree.run(tree.app, ["fn", "show", "xyzzy"], cli.environ()) == 4
    assert "did you mean" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        (["aloc"], "alloc"),
        (["alloc", "creat"], "create"),
        (["alloc", "create", "--skus", "g1.1"], "--sku"),
        (["fn", "invoke", "f", "--assync"], "--async"),
    ],
)
def test_an_unknown_command_or_option_comes_with_the_nearest(
    cli: Cli, capfd: pytest.CaptureFixture[str], line: list[str], meant: str
) -> None:
    assert tree.run(tree.app, line, cli.environ()) == 1
    assert meant in capfd.readouterr().err.partition("(code=")[0].split("No such")[1]

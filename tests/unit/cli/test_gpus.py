"""A node's GPUs on the command line: which one is meant, and how a return ends."""

import json

import pytest

from penstock.cli import app as tree
from penstock.cli import gpus
from scripted_api import ScriptedApi, json_answer

from .answers import MOMENT
from .cases import GPU, NOD, NODE, SLT
from .conftest import Cli

OUT = {
    "cause": "failed",
    "detail": "XID 79: the GPU has fallen off the bus",
    "since": MOMENT,
    "well_since": None,
    "probing": True,
    "probe_detail": "",
}


def node(**quarantine: object) -> dict[str, object]:
    """A node whose one GPU is in quarantine."""
    return NODE | {"gpus": [GPU | {"health": "quarantined", "quarantine": OUT | quarantine}]}


def run(cli: Cli, line: str) -> int:
    return tree.run(tree.app, line.split(), cli.environ())


def test_gpus_are_listed_with_what_their_sensors_show(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    api.on("GET", f"/nodes/{NOD}", json_answer(node()))
    assert run(cli, f"node gpu list {NOD}") == 0
    shown = capfd.readouterr().out
    for text in ("quarantined", "41 °C", "62 W", "1 GiB", "0/0/0"):
        assert text in shown


@pytest.mark.parametrize("gpu", ["0", "GPU-1", SLT])
def test_a_gpu_is_named_by_number_uuid_or_slot(api: ScriptedApi, cli: Cli, gpu: str) -> None:
    cli.logged_in(api)
    api.on("GET", f"/nodes/{NOD}", json_answer(NODE))
    api.on("POST", f"/nodes/{NOD}/slots/{SLT}/quarantine", json_answer(GPU))
    assert run(cli, f"node gpu quarantine {NOD} {gpu}") == 0
    assert json.loads(api.seen[-1].body) == {"reason": "", "drain": False}


def test_a_gpu_that_is_not_there_is_named(api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    cli.logged_in(api)
    api.on("GET", f"/nodes/{NOD}", json_answer(NODE))
    assert run(cli, f"node gpu return {NOD} 7") == 4
    assert "no GPU 7" in capfd.readouterr().err


def test_a_return_waits_for_the_probe_and_says_why_it_did_not_pass(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "_LOOK_S", 0.01)
    cli.logged_in(api)
    api.on("POST", f"/nodes/{NOD}/slots/{SLT}/return", json_answer(GPU | {"quarantine": OUT}, status=202))
    api.on("GET", f"/nodes/{NOD}", json_answer(node(probing=False, probe_detail="too hot: 90 °C or more")))
    assert run(cli, f"node gpu return {NOD} {SLT}") != 0
    assert "too hot" in capfd.readouterr().err


def test_a_return_that_passes_is_a_success(api: ScriptedApi, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_LOOK_S", 0.01)
    cli.logged_in(api)
    api.on("POST", f"/nodes/{NOD}/slots/{SLT}/return", json_answer(GPU | {"quarantine": OUT}, status=202))
    api.on("GET", f"/nodes/{NOD}", json_answer(NODE))
    assert run(cli, f"node gpu return {NOD} {SLT}") == 0

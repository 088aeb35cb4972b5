"""The exit code of every command for every kind of end, as docs/guides/command-line.md has them."""

from typing import Any

import pytest

from penstock.cli import app as tree
from penstock.cli import gpus, serving
from scripted_api import ScriptedApi, error_answer, json_answer

from .answers import allocation, page
from .cases import ALC, CASES, GPU, NOD, NODE, OBJECT, SKU, SLT
from .conftest import Cli
from .functioncases import FUNCTION, INVOCATION
from .test_functions import SOURCE, key
from .test_gpus import OUT

LINES = {line: (method, path) for line, method, path, _, _ in CASES}
CREATE = ["alloc", "create", "--sku", "g1.1", "--wait"]


def codes(cli: Cli, api: ScriptedApi, *answer: Any) -> dict[str, int]:
    """How each command ends when the api answers so."""
    found: dict[str, int] = {}
    for line, (method, path) in LINES.items():
        if answer:
            api.on(method, path, error_answer(*answer, Retry_After="0"))
        found[line] = tree.run(tree.app, line.split(), cli.environ())
    return found


@pytest.mark.parametrize(
    ("status", "code", "exit_code"),
    [
        (403, "permission_denied", 3),
        (404, "not_found", 4),
        (409, "conflict", 5),
        (429, "compute.quota_exceeded", 7),
    ],
)
def test_every_command_ends_with_the_code_of_its_refusal(
    api: ScriptedApi, cli: Cli, status: int, code: str, exit_code: int
) -> None:
    cli.logged_in(api)
    ended = codes(cli, api, status, code, "no")
    assert {line: found for line, found in ended.items() if found != exit_code} == {}


def test_every_command_without_a_key_says_so(api: ScriptedApi, cli: Cli) -> None:
    cli.env |= {"PENSTOCK_API_URL": api.url}
    assert {line: found for line, found in codes(cli, api).items() if found != 3} == {}
    assert api.seen == []


@pytest.mark.parametrize("away", [True, False])
@pytest.mark.parametrize("line", ["alloc list", "fn list", "alloc create --sku g1.1", f"alloc release {ALC}"])
def test_a_server_that_is_away_or_fails_is_2(
    api: ScriptedApi, cli: Cli, monkeypatch: pytest.MonkeyPatch, line: str, away: bool
) -> None:
    monkeypatch.setattr("penstock.sdk.protocol.backoff_s", lambda _: 0.0)
    cli.logged_in(api)
    if away:
        cli.env["PENSTOCK_API_URL"] = "http://127.0.0.1:1"
    else:
        for method, path in (("GET", "/allocations"), ("GET", "/functions"), ("POST", "/allocations")):
            api.on(method, path, error_answer(500, "internal", "no"))
        api.on("POST", f"/allocations/{ALC}/release", error_answer(500, "internal", "no"))
    assert tree.run(tree.app, line.split(), cli.environ()) == 2


@pytest.mark.parametrize(
    ("ended", "argv", "exit_code"),
    [
        ({"state": "failed", "reason": "the unit did not start: no image 'x'", "node_id": NOD}, [], 1),
        ({"state": "failed", "reason": "no capacity within 5 s", "node_id": None}, [], 7),
        ({"state": "released", "reason": "the unit exited with code 3", "node_id": NOD}, ["--", "false"], 6),
        ({"state": "released", "reason": "released by its owner", "node_id": NOD}, ["--", "false"], 1),
    ],
)
def test_an_allocation_that_does_not_become_active(
    api: ScriptedApi, cli: Cli, ended: dict[str, Any], argv: list[str], exit_code: int
) -> None:
    cli.logged_in(api)
    api.on("POST", "/allocations", json_answer(allocation("requested", ALC), 201))
    api.on("GET", f"/allocations/{ALC}", json_answer(allocation("requested", ALC) | ended))
    assert tree.run(tree.app, [*CREATE, *argv], cli.environ()) == exit_code


def test_a_release_that_fails_is_a_failure_of_the_work(api: ScriptedApi, cli: Cli) -> None:
    cli.logged_in(api)
    api.on("POST", f"/allocations/{ALC}/release", json_answer(allocation("releasing", ALC)))
    api.on("GET", f"/allocations/{ALC}", json_answer(allocation("release_failed", ALC)))
    assert tree.run(tree.app, ["alloc", "release", ALC, "--wait"], cli.environ()) == 1


def test_waits_that_run_out_are_124(api: ScriptedApi, cli: Cli, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_POLL_S", 0.01)
    monkeypatch.setattr(gpus, "_LOOK_S", 0.01)
    cli.logged_in(api)
    api.on("POST", "/allocations", json_answer(allocation("requested", ALC), 201))
    api.on("GET", f"/allocations/{ALC}", json_answer(allocation("requested", ALC)))
    assert tree.run(tree.app, [*CREATE, "--timeout", "0.1"], cli.environ()) == 124
    file = tmp_path / "work" / "shop.py"
    file.parent.mkdir()
    file.write_text(SOURCE)
    starting = FUNCTION | {"name": "shop-price", "serving_version": 2}
    api.on("GET", "/objects", json_answer(page([])))
    api.on("GET", "/skus", json_answer(page([SKU])))
    api.on("PUT", f"/objects/{key(file)}", json_answer(OBJECT))
    api.on("PUT", "/functions/shop-price", json_answer(starting))
    api.on("GET", "/functions/shop-price", json_answer(starting))
    deploy = ["fn", "deploy", str(file), "--name", "price", "--timeout", "0.1"]
    assert tree.run(tree.app, deploy, cli.environ()) == 124
    api.on("POST", f"/nodes/{NOD}/slots/{SLT}/return", json_answer(GPU | {"quarantine": OUT}, status=202))
    api.on("GET", f"/nodes/{NOD}", json_answer(NODE | {"gpus": [GPU | {"quarantine": OUT}]}))
    back = ["node", "gpu", "return", NOD, SLT, "--timeout", "0.1"]
    assert tree.run(tree.app, back, cli.environ()) == 124


@pytest.mark.parametrize(
    ("state", "failure_class", "error_type", "exit_code"),
    [
        ("failed", "handler_error", "ValueError", 6),
        ("failed", "oom", "", 6),
        ("failed", "framework_timeout", "", 6),
        ("failed", "retry_exhausted", "", 1),
        ("failed", "no_worker_template", "", 1),
        ("failed", "activation_timeout", "", 7),
        ("failed", "backpressure", "", 7),
        ("cancelled", "cancelled", "", 1),
        ("expired", "", "", 1),
        ("dead_lettered", "retry_exhausted", "ValueError", 6),
    ],
)
def test_a_call_that_does_not_succeed(
    api: ScriptedApi, cli: Cli, state: str, failure_class: str, error_type: str, exit_code: int
) -> None:
    cli.logged_in(api)
    ended = {"state": state, "failure_class": failure_class, "error_type": error_type, "error": "no"}
    api.on("POST", "//f/shop-price", error_answer(500, "x", "no", Penstock_Invocation_Id="inv-1"))
    api.on("GET", "/invocations/inv-1", json_answer(INVOCATION | ended))
    assert tree.run(tree.app, ["fn", "invoke", "shop-price"], cli.environ()) == exit_code


@pytest.mark.parametrize(
    ("line", "exit_code"),
    [
        (["nonsense"], 1),
        (["alloc", "create"], 1),
        (["alloc", "create", "--sku", "g1.1", "--nonsense"], 1),
        (["egress", "deny", "pypi.org"], 4),
        (["node", "gpu", "return", NOD, "7"], 4),
        (["status"], 2),
        (["key", "show"], 1),
    ],
)
def test_what_is_refused_here(api: ScriptedApi, cli: Cli, line: list[str], exit_code: int) -> None:
    cli.logged_in(api)
    api.on("GET", "/egress", json_answer({"rules": []}))
    api.on("GET", f"/nodes/{NOD}", json_answer(NODE))
    assert cli.run(*line).returncode == exit_code

"""Amounts of budgets as people type them."""

import pytest

from penstock.cli import app as tree
from scripted_api import ScriptedApi, json_answer

from .cases import BDG, BUDGET, KEYID, page
from .conftest import Cli


@pytest.mark.parametrize("limit", ["1.0000001", "1e3", "ten", "", "1,5"])
def test_what_is_no_amount_of_dollars_is_not_sent(api: ScriptedApi, cli: Cli, limit: str) -> None:
    cli.fails(1, "billing", "budget", "set", "--per", "hourly", f"--limit={limit}", says="limit must be dollars")
    assert api.seen == []


def test_a_list_is_short_and_a_deletion_is_told(api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    cli.logged_in(api)
    api.on("GET", "/billing/budgets", json_answer(page([{**BUDGET, "key_id": KEYID}])))
    api.on("DELETE", f"/billing/budgets/{BDG}", json_answer(None))
    assert tree.run(tree.app, ["billing", "budget", "list"], cli.environ()) == 0
    text = capfd.readouterr().out
    assert max(map(len, text.splitlines())) <= 120, text
    assert tree.run(tree.app, ["billing", "budget", "delete", BDG], cli.environ()) == 0
    assert capfd.readouterr().err == f"deleted budget {BDG}\n"

"""Amounts of budgets as people type them."""

import pytest

from scripted_api import ScriptedApi

from .conftest import Cli


@pytest.mark.parametrize("limit", ["1.0000001", "1e3", "ten", "", "-1", "1,5"])
def test_what_is_no_amount_of_dollars_is_not_sent(api: ScriptedApi, cli: Cli, limit: str) -> None:
    cli.fails(1, "billing", "budget", "set", "--per", "hourly", f"--limit={limit}", says="limit must be dollars")
    assert api.seen == []

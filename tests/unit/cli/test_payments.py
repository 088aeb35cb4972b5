"""Topping up: amounts as they are typed, waiting, and paying without a browser."""

import json
from typing import Any

import pytest

from penstock.cli import app as tree
from penstock.cli.errors import CliError
from penstock.cli.payments import cents
from scripted_api import ScriptedApi, json_answer, text_answer

from .cases import PAY, PAYMENT, page
from .conftest import Cli

SESSION = "cs_local_" + "0" * 40


def run(cli: Cli, line: str) -> int:
    return tree.run(tree.app, line.split(), cli.environ())


@pytest.mark.parametrize(
    ("text", "expected"),
    [("20", 20_000_000), ("20.5", 20_500_000), ("$20.05", 20_050_000), ("0.01", 10_000), ("1000000", 10**12)],
)
def test_dollars_are_read_exactly(text: str, expected: int) -> None:
    assert cents(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "1e3", "20.505", "20.500", "1,000", "٢٠", "20 USD", "nan", "99999999"])
def test_what_is_no_amount_in_cents_is_refused(text: str) -> None:
    with pytest.raises(CliError) as caught:
        cents(text)
    assert caught.value.field == "amount"


def test_a_top_up_is_paid_and_waited_for(api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    cli.logged_in(api)
    made = {**PAYMENT, "provider": "local", "checkout_url": f"{api.url}/pay/{SESSION}"}
    api.on("POST", "/billing/topups", json_answer(made))
    api.on("GET", f"/billing/payments/{PAY}", json_answer(made), json_answer({**made, "state": "succeeded"}))
    api.on("POST", f"//pay/{SESSION}/pay", text_answer("<h1>Paid</h1>"))
    assert run(cli, "billing topup 20.50 --pay --wait -o json") == 0, capfd.readouterr().err
    printed = capfd.readouterr()
    assert json.loads(printed.out)["state"] == "succeeded"
    assert f"{PAY} succeeded" in printed.err
    assert [seen.path.rpartition("/")[2] for seen in api.seen] == ["topups", "pay", PAY, PAY]


@pytest.mark.parametrize(
    "made", [PAYMENT, {**PAYMENT, "provider": "local", "checkout_url": "https://elsewhere.example/steal"}]
)
def test_only_the_local_provider_is_paid_by_a_command(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str], made: dict[str, Any]
) -> None:
    cli.logged_in(api)
    api.on("POST", "/billing/topups", json_answer(made))
    assert run(cli, "billing topup 20 --pay") == 1
    assert "only payments of the local provider" in capfd.readouterr().err
    assert len(api.seen) == 1


def test_a_payment_that_was_not_made_is_an_error(api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    cli.logged_in(api)
    api.on("POST", "/billing/topups", json_answer(PAYMENT))
    ended = {
        **PAYMENT,
        "state": "expired",
        "reason": "nobody paid: the checkout page was cancelled, or its time was over",
    }
    api.on("GET", f"/billing/payments/{PAY}", json_answer(ended))
    assert run(cli, "billing topup 20 --wait") == 1
    printed = capfd.readouterr().err
    assert PAYMENT["checkout_url"] in printed
    assert "expired" in printed


def test_a_list_says_all_where_there_is_no_terminal(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    reason = "nobody paid: the checkout page was cancelled, or its time was over"
    api.on("GET", "/billing/payments", json_answer(page([{**PAYMENT, "reason": reason}])))
    assert run(cli, "billing payments") == 0
    text = capfd.readouterr().out
    assert reason in text
    assert run(cli, "billing payments -o csv") == 0
    assert reason in capfd.readouterr().out

"""What people read of their money, and what they type."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from penstock.billing import pages
from penstock.cli import app as tree
from penstock.cli.figures import lasting, remaining
from penstock.wire import rest
from scripted_api import ScriptedApi, json_answer

from .cases import BALANCE, COSTS, INVOICE, LEDGER, ORG, STATEMENT, TRANSFER
from .conftest import Cli


def shown(cli: Cli, capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert tree.run(tree.app, ["billing", *arguments], cli.environ()) == code
    return capfd.readouterr().out


def test_costs_are_shown_exactly_with_their_total(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    api.on("GET", "/billing/usage", json_answer(COSTS))
    text = shown(cli, capfd, "usage", "--by", "label:team", "-p", f"prj_{'0' * 26}")
    assert "vision" in text
    assert "allocation.interactive=1.0000 h" in text
    assert "$0.0001" in text
    assert "$3.4901 from 2026-01-01 to 2026-01-31" in text
    assert api.seen[0].query == {"group_by": "label:team", "project": f"prj_{'0' * 26}", "limit": "200"}


def test_all_pages_of_a_statement_are_one(api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    cli.logged_in(api)
    first: dict[str, Any] = {**STATEMENT, "next_cursor": "c2"}
    api.on("GET", "/billing/statement", json_answer(first), json_answer(STATEMENT), json_answer(STATEMENT))
    found = json.loads(shown(cli, capfd, "statement", "-o", "json"))
    assert (len(found["items"]), found["next_cursor"]) == (2, None)
    assert api.seen[1].query["cursor"] == "c2"
    lines = shown(cli, capfd, "statement", "-o", "csv").splitlines()
    assert ",'=1+1," in lines[1]
    assert lines[1].endswith(",-3.49,0.000001,0.00,-3.49,0.000001,0.00")
    download = pages.statement_csv(msgspec.convert(STATEMENT, rest.Statement).items, heading=True)
    assert lines == download.splitlines(), "the same as the API's own"


def test_numbers_in_csv_have_no_units(api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    cli.logged_in(api)
    api.on("GET", "/billing/usage", json_answer(COSTS))
    api.on("GET", "/billing/balance", json_answer({**BALANCE, "available_microusd": 10**12}))
    api.on("GET", "/billing/invoices/2026-01", json_answer(INVOICE))
    text = shown(cli, capfd, "usage", "-o", "csv") + shown(cli, capfd, "balance", "-o", "csv")
    assert "allocation.interactive=1.0000" in text
    assert ",1000000.00," in text
    invoice = shown(cli, capfd, "invoice", "2026-01", "-o", "csv")
    assert invoice.splitlines()[1].endswith("allocation.interactive,g1.1,8,1.0000,3.49,1,3.49")
    assert "$" not in text + invoice


@pytest.mark.parametrize(
    ("available", "lasts_s", "text"), [(0, None, "nothing left"), (-1, 0.0, "nothing left"), (1, None, "for ever")]
)
def test_nothing_does_not_last_for_ever(available: int, lasts_s: float | None, text: str) -> None:
    found = msgspec.convert({**BALANCE, "available_microusd": available, "lasts_s": lasts_s}, rest.Balance)
    assert remaining(found) == text


def test_tables_fit_a_terminal_and_ids_stay_whole(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    transfer_id = f"usage/{ORG}/2026-11-16T04:46:35Z"
    line = {**STATEMENT["items"][0], "transfer_id": transfer_id, "memo": ""}
    api.on("GET", "/billing/statement", json_answer({**STATEMENT, "items": [line]}))
    text = shown(cli, capfd, "statement")
    assert transfer_id in text
    assert "-$3.489999" in text, "balance and credit together"
    usage = {**TRANSFER["usage"][0], "project_id": f"prj_{'0' * 26}", "resource_id": f"alc_{'0' * 26}"}
    found = {**TRANSFER, "id": transfer_id, "usage": [usage]}
    api.on("GET", f"/billing/transfers/{transfer_id}", json_answer(found))
    both = text + shown(cli, capfd, "transfer", transfer_id)
    assert max(map(len, both.splitlines())) <= 120, both


def test_an_invoice_is_written_as_a_page(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<!doctype html>", content_type="text/html")

    cli.logged_in(api)
    api.on("GET", "/billing/invoices/2026-01/page", page)
    shown(cli, capfd, "invoice", "2026-01", "--html", str(tmp_path / "invoice.html"))
    assert (tmp_path / "invoice.html").read_text() == "<!doctype html>"
    shown(cli, capfd, "invoice", "2026-01", "--html", str(tmp_path / "no" / "folder"), code=1)
    shown(cli, capfd, "invoice", "--html", str(tmp_path / "x"), code=1)
    api.on("GET", "/billing/invoices/2026-01", json_answer(INVOICE))
    text = shown(cli, capfd, "invoice", "2026-01")
    for part in ("2026-01 (draft)", "$3.489999", "1.0000 h", "$3.49 per h", "-$0.000001", "g1.1 x 8"):
        assert part in text


def test_a_ledger_that_does_not_hold_ends_with_five(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    problem = {"check": "zero_sum", "subject": "payment/1", "detail": "2 entries sum to 1"}
    api.on("GET", "/billing/verify", json_answer({**LEDGER, "holds": False, "problems": [problem]}))
    for output in ("table", "json", "csv"):
        assert "payment/1" in shown(cli, capfd, "verify", "-o", output, code=5)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"grant {ORG} -1 --memo m", "No such option"),
        (f"grant {ORG} 1e3 --memo m", "amount must be dollars"),
        (f"grant {ORG} 0.0000001 --memo m", "amount must be dollars"),
        (f"grant {ORG} 0 --memo m", "amount must be $0.000001 to $1,000,000.00"),
        (f"terms {ORG} --credit-limit x", "credit-limit must be dollars"),
        (f"terms {ORG} --credit-limit 99999999999", "credit-limit must be $0.00 to $1,000,000.00"),
        ("topup 0", "amount must be $1.00 to $1,000,000.00, not '0'"),
        ("topup 99999999999", "amount must be $1.00 to $1,000,000.00"),
        ("topup 1.234567", "amount must be dollars with up to two decimals"),
        ("terms org_nonsense --credit-limit 1", "organisation_id must look like"),
        ("usage --from yesterday", "from must be a day such as"),
        ("statement --to 2026-02-30", "to must be a day such as"),
        ("invoice nov", "month must look like"),
        ("transfer ../../keys", "transfer_id must look like"),
        ("price set Tokens 1", "meter must be"),
        ("price set tokens 1 --effective soon", "effective must be a time"),
    ],
)
def test_what_is_typed_wrongly_is_refused_here(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str], line: str, says: str
) -> None:
    cli.logged_in(api)
    assert tree.run(tree.app, ["billing", *line.split()], cli.environ()) == 1
    assert says in capfd.readouterr().err
    assert api.seen == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (7260, "2 h 1 min"),
        (90_000, "1 d 1 h"),
        (1e9, "11,574 d 1 h"),
    ],
)
def test_times_have_two_units(seconds: float, text: str) -> None:
    assert lasting(seconds) == text

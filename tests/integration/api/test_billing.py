"""The ledger over HTTP: documents as people download them, ids with slashes, one effect per key."""

import asyncio
import csv
import io

import pytest

from integration.billing.stage import HOUR, T0, Stage
from penstock.billing.store import accrual
from penstock.kit import db
from penstock.sdk.client import Client

from .conftest import Api, People

WELCOME = "grant/welcome/org_default"


@pytest.fixture(scope="package")
async def used(api: Api) -> None:
    """The default organisation had an allocation for an hour in January, at $3.49."""
    async with db.connect(api.database_url, lambda *_: None) as database:
        stage = Stage(database)
        now = await stage.value("select accrued_until from billing.progress")
        await stage.begin()
        await stage.start(T0, end=T0 + HOUR, org="org_default", price=3_490_000)
        await stage.catch_up(T0 + HOUR)
        async with database.transaction() as tx:
            await accrual.advance(tx, now)


@pytest.mark.usefixtures("used")
async def test_an_invoice_is_a_page_that_loads_nothing(api: Api, people: People) -> None:
    answer = await api.call("GET", "/billing/invoices/2026-01/page")
    assert answer.status == 200, answer.content
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert b"$3.49" in answer.content
    assert b"<script" not in answer.content
    shown = await api.call("GET", "/billing/invoices/2026-01")
    assert (shown.json["total_microusd"], shown.json["total_cents"], shown.json["draft"]) == (3_490_000, 349, False)
    for path in ("/billing/invoices/2026-01", "/billing/invoices/2026-01/page"):
        assert (await api.call("GET", path, key=people.stranger.key)).status == 404
        assert (await api.call("GET", path, key=people.viewer.key)).status == 403


@pytest.mark.usefixtures("used")
async def test_a_statement_is_exported_whole(api: Api, people: People) -> None:
    answer = await api.call("GET", "/billing/statement.csv")
    assert answer.status == 200, answer.content
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert "attachment" in answer.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(answer.content.decode(), newline="")))
    assert len(rows) >= 61
    assert WELCOME in {row["transfer_id"] for row in rows}
    theirs = await api.call("GET", "/billing/statement.csv", key=people.stranger.key)
    shown = {row["transfer_id"] for row in csv.DictReader(io.StringIO(theirs.content.decode(), newline=""))}
    assert not shown & {row["transfer_id"] for row in rows}
    assert (await api.call("GET", "/billing/statement.csv", key=people.viewer.key)).status == 403


@pytest.mark.usefixtures("used")
async def test_a_transfer_is_found_by_its_id_with_slashes(api: Api, people: People) -> None:
    for transfer_id, kind in ((WELCOME, "grant"), ("usage/org_default/2026-01-05T10:00:00Z", "usage")):
        answer = await api.call("GET", f"/billing/transfers/{transfer_id}")
        assert (answer.status, answer.json["kind"]) == (200, kind)
        assert (await api.call("GET", f"/billing/transfers/{transfer_id}", key=people.stranger.key)).status == 404


@pytest.mark.usefixtures("used")
async def test_the_client_reads_what_the_server_writes(api: Api) -> None:
    def ask() -> None:
        with Client(f"http://127.0.0.1:{api.port}", api.admin_key) as client:
            found = client.billing.statement()
            assert len(found.items) >= 61
            assert found.closing == found.items[-1].after
            assert len(client.billing.statement(limit=3).items) == 3
            costs = client.billing.usage(group_by="sku", from_day="2026-01-01", to_day="2026-01-31")
            assert (costs.total_microusd, [cost.group for cost in costs.items]) == (3_490_000, ["g1.1"])
            assert client.billing.transfer(WELCOME).kind == "grant"
            assert [invoice.month for invoice in client.billing.invoices()] == ["2026-01"]
            assert client.billing.invoice_page("2026-01").startswith(b"<!doctype html>")
            made = client.billing.set_price("tokens.out", price_microusd=200_000, per=1_000_000)
            assert client.billing.set_terms("org_default", credit_limit_microusd=5).credit_limit_microusd == 5
            assert list(client.billing.price_history("tokens.out")) == [made]
            assert client.billing.balance().credit_limit_microusd == 5
            assert client.billing.terms("org_default").credit_limit_microusd == 5
            client.billing.set_terms("org_default", credit_limit_microusd=0)
            assert client.billing.verify(from_day="2026-01-01", to_day="2026-01-31").holds

    await asyncio.to_thread(ask)
    [audited] = (await api.call("GET", "/audit?action=billing.price&limit=1")).json["items"]
    assert audited["detail"].keys() == {"version", "price_microusd", "per", "effective_at"}


async def test_terms_are_shown_to_operators_of_organisations_that_exist(api: Api, people: People) -> None:
    refused = await api.call("GET", "/billing/terms/org_default", key=people.stranger.key)
    assert (refused.status, refused.error["message"]) == (
        403,
        "operators only: no role in an organisation allows billing.adjust",
    )
    for unknown in ("org_" + "0" * 26, "x"):
        assert (await api.call("GET", f"/billing/terms/{unknown}")).status == 404


async def test_a_grant_happens_once_for_its_key(api: Api) -> None:
    body = {"organisation_id": "org_default", "amount_microusd": 1_000_000, "memo": "sorry"}
    once = {"Idempotency-Key": "grant-1"}
    before = (await api.call("GET", "/billing/balance")).json["credit_microusd"]
    first, second = [await api.call("POST", "/billing/grants", json=body, headers=once) for _ in range(2)]
    assert (first.status, second.status) == (201, 201)
    assert first.json == second.json
    assert (await api.call("GET", "/billing/balance")).json["credit_microusd"] == before + 1_000_000
    other = await api.call("POST", "/billing/grants", json=body | {"amount_microusd": 2}, headers=once)
    assert other.status == 409
    undone = {"transfer_id": first.json["id"], "amount_microusd": 1_000_000, "memo": "undone"}
    assert (await api.call("POST", "/billing/corrections", json=undone)).status == 201
    again = await api.call("POST", "/billing/corrections", json=undone)
    assert (again.status, again.error["field"]) == (409, "amount_microusd")
    assert (await api.call("GET", "/billing/verify")).json["holds"]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/billing/usage?from=2026-13-01", "from"),
        ("/billing/usage?from=2026-02-01&to=2026-01-01", "from"),
        ("/billing/usage?from=2020-01-01&to=2026-01-01", "from"),
        ("/billing/usage?to=9999-12-31", "to"),
        ("/billing/usage?group_by=colour", "group_by"),
        ("/billing/usage?project=prj_x", "project"),
        ("/billing/statement?to=soon", "to"),
        ("/billing/statement?cursor=abc", "cursor"),
        ("/billing/verify?organisation_id=x", "organisation_id"),
        ("/billing/verify?to=0001-01-01", "to"),
    ],
)
async def test_a_bad_question_names_its_field(api: Api, path: str, field: str) -> None:
    answer = await api.call("GET", path)
    assert (answer.status, answer.error["field"]) == (400, field), answer.error


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"amount_microusd": 0}, "amount_microusd"),
        ({"amount_microusd": 10**13}, "amount_microusd"),
        ({"amount_microusd": 1.5}, "amount_microusd"),
        ({"memo": ""}, "memo"),
        ({"memo": "m" * 201}, "memo"),
        ({"organisation_id": "org_" + "0" * 26}, "organisation_id"),
        ({"currency": "EUR"}, "currency"),
    ],
)
async def test_a_bad_grant_names_its_field(api: Api, change: dict[str, object], field: str) -> None:
    body = {"organisation_id": "org_default", "amount_microusd": 1, "memo": "m"} | change
    answer = await api.call("POST", "/billing/grants", json=body)
    assert (answer.status, answer.error["field"]) == (400, field), answer.error

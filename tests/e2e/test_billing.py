"""Money on the whole cloud: topped up, spent by the second, used up; and everything that runs on it is released."""

import csv
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from e2e.cloud import Cloud

pytestmark = pytest.mark.timeout(300)
DEPLETED = "the organisation's balance is used up: top up and create it again"


@dataclass(frozen=True)
class Renter:
    """An organisation with one project, and an offer that costs two dollars a second."""

    cloud: Cloud
    organisation_id: str
    project_id: str

    def json(self, *arguments: str) -> Any:
        """A command in the renter's project."""
        return self.cloud.json(*arguments, "-p", self.project_id)

    def ok(self, *arguments: str) -> str:
        """The same, as people see it."""
        return self.cloud.ok(*arguments, "-p", self.project_id)

    def rent(self) -> str:
        """One GPU, active."""
        return self.json("alloc", "create", "--sku", "gold", "--wait")["id"]

    def allocations(self) -> dict[str, Any]:
        """What was rented, by id."""
        return {found["id"]: found for found in self.json("alloc", "list", "--all")["items"]}


@pytest.fixture(scope="module")
def renter(stack: Cloud) -> Iterator[Renter]:
    """Made by the operator, as any customer is."""
    shape = ("--gpu-model", "*", "--memory", "0.25", "--cpus", "0.5", "--count", "1")
    stack.ok("sku", "set", "gold", "--price", "7200", *shape)
    organisation = stack.json("org", "create", "renter")["id"]
    project = stack.json("project", "create", "renting", "--organisation", organisation)["id"]
    yield Renter(stack, organisation, project)
    for found in stack.json("alloc", "list", "-p", project)["items"]:
        if found["state"] not in ("released", "failed"):
            stack.ok("alloc", "release", found["id"], "--wait", "-p", project)


def _facts(renter: Renter) -> Counter[str]:
    listed = renter.cloud.json("events", "-p", renter.project_id)["items"]
    of_renter = (event for event in listed if event["aggregate_id"].startswith(renter.organisation_id))
    return Counter(event["event_type"] for event in of_renter)


def test_nothing_is_rented_without_money(renter: Renter) -> None:
    refused = renter.cloud.run("alloc", "create", "--sku", "gold", "-p", renter.project_id)
    assert refused.returncode != 0
    assert "insufficient funds: $0.00 there, $10.00 needed" in refused.stderr


def test_a_balance_that_is_used_up_releases_all_that_runs_on_it(renter: Renter) -> None:
    paid = renter.json("billing", "topup", "60", "--pay", "--wait")
    assert (paid["state"], renter.json("billing", "balance")["balance_microusd"]) == ("succeeded", 60_000_000)
    with ThreadPoolExecutor(3) as together:
        # One after the other, the first would use up on a slow machine what the last one needs.
        rented = set(together.map(lambda _: renter.rent(), range(3)))
    deadline = time.monotonic() + 90
    while {found["state"] for found in renter.allocations().values()} != {"released"}:
        assert time.monotonic() < deadline, renter.allocations()
        time.sleep(0.3)
    assert {key: found["reason"] for key, found in renter.allocations().items()} == dict.fromkeys(rented, DEPLETED)
    told = _facts(renter)
    names = ("low_balance_warning", "auto_release_pending", "balance_depleted")
    assert [told[f"billing.{name}"] for name in names] == [1, 1, 1]
    assert told["provisioning.force_release_requested"] == 1


def test_what_was_charged_is_in_reports_statement_and_ledger_alike(renter: Renter) -> None:
    deadline = time.monotonic() + 30
    while renter.json("billing", "balance")["burn_microusd_per_hour"] or _unsettled(renter):
        assert time.monotonic() < deadline, "the last seconds were not charged"
        time.sleep(0.5)
    spent = 60_000_000 - renter.json("billing", "balance")["balance_microusd"]
    by_allocation = renter.json("billing", "usage", "--by", "allocation")
    assert by_allocation["total_microusd"] == spent == sum(each["amount_microusd"] for each in by_allocation["items"])
    lines = list(csv.DictReader(renter.ok("billing", "statement", "-o", "csv").splitlines()))
    assert len(lines) >= 3
    checked = renter.json("billing", "verify")
    assert not [problem for problem in checked["checks"] if problem["problems"]]
    page = renter.ok("billing", "invoice", time.strftime("%Y-%m", time.gmtime()))
    assert "gold" in page


def _unsettled(renter: Renter) -> bool:
    """Whether an allocation's end is not charged yet: its time, by its own row, is more than what was charged."""
    charged = sum(each["amount_microusd"] for each in renter.json("billing", "usage", "--by", "allocation")["items"])
    time.sleep(2.5)
    return charged != sum(
        each["amount_microusd"] for each in renter.json("billing", "usage", "--by", "allocation")["items"]
    )


def test_money_that_comes_later_brings_nothing_back(renter: Renter) -> None:
    renter.ok("billing", "topup", "100", "--pay", "--wait")
    deadline = time.monotonic() + 30
    while renter.json("billing", "balance")["state"] != "healthy":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert {found["state"] for found in renter.allocations().values()} == {"released"}

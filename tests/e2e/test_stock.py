"""Warm stock on the whole cloud: an allocation from stock is a tenant's own, and the stock is refilled."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chaos.invariants import sandboxes, unit_folders
from e2e.cloud import Cloud

pytestmark = pytest.mark.timeout(300)
#: Whose the unit is, which allocation, and which secrets it was given.
TELL = """
import os
print(os.environ["WHOSE"], os.environ["PENSTOCK_ALLOCATION"], sep="\\n")
print(sorted(os.listdir("/run/secrets")) if os.path.isdir("/run/secrets") else [])
"""


def eventually(check: Callable[[], object], *, within_s: float = 90) -> None:
    """Fail when `check` is not true in time."""
    deadline = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def floor(stack: Cloud) -> Any:
    """The one floor as operators see it."""
    return stack.json("stock", "list")["items"][0]


@pytest.fixture
def stocked(stack: Cloud) -> Iterator[Cloud]:
    """The cloud with one unit in stock, and with none afterwards."""
    stack.ok("stock", "set", "g1.1", "--floor", "1")
    eventually(lambda: floor(stack)["ready"] == 1)
    yield stack
    stack.ok("stock", "remove", "g1.1")
    eventually(lambda: stack.json("alloc", "list", "--state", "active", "-p", "prj_platform")["items"] == [])
    eventually(lambda: stack.json("alloc", "list", "--state", "releasing", "-p", "prj_platform")["items"] == [])


def test_an_allocation_from_stock_is_its_tenants_own_and_the_stock_is_refilled(stocked: Cloud) -> None:
    kept = {each["id"] for each in stocked.json("alloc", "list", "--state", "active", "-p", "prj_platform")["items"]}
    stocked.ok("secret", "set", "stock-token", "--from-stdin", stdin="hush-1f3a")
    mine = stocked.json("alloc", "create", "--sku", "g1.1", "--env", "WHOSE=mine", "--secret", "stock-token", "--wait")
    eventually(lambda: floor(stocked)["ready"] == 1)
    theirs = stocked.json("alloc", "create", "--sku", "g1.1", "--env", "WHOSE=theirs", "--wait")
    assert len(kept & unit_folders(stocked)) == 1
    for allocation, whose, secrets in ((mine, "mine", "['stock-token']"), (theirs, "theirs", "[]")):
        assert [line["reason"] for line in allocation["timeline"]] == ["", "from warm stock", ""]
        line = ("alloc", "exec", allocation["id"], "--", "python3", "-c", TELL)
        assert stocked.ok(*line).splitlines() == [whose, allocation["id"], secrets]
    stocked.ok("secret", "delete", "stock-token")
    for allocation in (mine, theirs):
        stocked.ok("alloc", "release", allocation["id"], "--wait", timeout_s=90)
    eventually(lambda: floor(stocked)["ready"] == 1)
    assert floor(stocked)["handed_over"] >= 2
    assert stocked.json("alloc", "list", "--state", "active")["items"] == []


def test_an_agent_killed_at_a_handoff_leaves_one_unit_or_none(stocked: Cloud) -> None:
    agent = stocked.pid_of("agent")
    os.kill(agent, signal.SIGSTOP)
    made = stocked.json("alloc", "create", "--sku", "g1.1")
    assert (made["state"], made["timeline"][-1]["reason"]) == ("provisioning", "from warm stock")
    os.kill(agent, signal.SIGKILL)
    eventually(lambda: stocked.json("alloc", "show", made["id"])["state"] in ("active", "failed"))
    if stocked.json("alloc", "show", made["id"])["state"] == "active":
        eventually(lambda: stocked.run("alloc", "exec", made["id"], "--", "echo", "here").stdout == "here\n")
    stocked.ok("alloc", "release", made["id"], "--wait", timeout_s=90)
    eventually(lambda: floor(stocked)["ready"] == 1)
    eventually(lambda: len(unit_folders(stocked)) == 1)
    assert set(sandboxes(unit_folders(stocked)).values()) == unit_folders(stocked)

"""A second node on another address, by following docs/guides/operate.md: its commands are read there and run. It serves
allocations and functions."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from e2e.cloud import Cloud, processes_of

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="another network needs root and iproute2"
    ),
]
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "operate.md"
CONTROL, HOST = "10.77.41.1", "10.77.41.2"
APP = """
import penstock
app = penstock.App("far")

@app.function(sku="g1.1")
def square(x: int) -> int:
    return x * x
"""


def steps(title: str) -> list[str]:
    """The commands of a section of the guide, without comments."""
    section = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^##)", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert section, f"the guide has no section {title!r}"
    blocks = re.findall(r"```sh\n(.*?)```", section[1], re.DOTALL)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


@contextmanager
def two_hosts() -> "Iterator[tuple[tuple[str, ...], tuple[str, ...]]]":
    """Two networks joined by a cable; what to put before a command to run it in the one or the other."""
    control, host = f"penstock-{os.getpid()}-control", f"penstock-{os.getpid()}-host"

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        for name in (control, host):
            ip("netns", "add", name)
        ip("-n", control, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", host)
        for name, address in ((control, CONTROL), (host, HOST)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for link in ("lo", "cable"):
                ip("-n", name, "link", "set", link, "up")
        yield ("ip", "netns", "exec", control), ("ip", "netns", "exec", host)
    finally:
        for name in (control, host):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextmanager
def agent(cloud: Cloud, prefix: tuple[str, ...], command: str, data: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """The command of the guide, run on the other host until it is stopped."""
    environment = cloud.environment() | {"PENSTOCK_DATA": str(data), "PENSTOCK_AGENT_SIMULATED_GPUS": "2"}
    with (
        (data.parent / "agent.log").open("ab") as log,
        subprocess.Popen([*prefix, "sh", "-c", command], env=environment, stdout=log, stderr=log) as running,
    ):
        try:
            yield running
        finally:
            running.send_signal(signal.SIGTERM)
            try:
                running.wait(30)
            finally:
                running.kill()


def until_ready(cloud: Cloud, name: str) -> str:
    deadline = time.monotonic() + 60
    while True:
        for node in cloud.json("node", "list")["items"]:
            if node["name"] == name and node["state"] == "ready":
                return node["id"]
        assert time.monotonic() < deadline, cloud.logs()
        time.sleep(0.2)


def until_answered(cloud: Cloud, allocation: str, command: str) -> str:
    """The output of a shell's command, once the agent is back."""
    deadline = time.monotonic() + 60
    while (done := cloud.run("alloc", "exec", allocation, "--", "sh", "-c", command)).returncode != 0:
        assert time.monotonic() < deadline, done.stderr
        time.sleep(0.2)
    return done.stdout


def serves_a_function(cloud: Cloud, node: str, app: Path) -> None:
    """Deploy it and call it; the calls reach the node by the one address that it can reach."""
    app.parent.mkdir()
    app.write_text(APP)
    cloud.ok("fn", "deploy", str(app), timeout_s=120)
    assert cloud.json("fn", "invoke", "far-square", "-d", '{"x": 7}', timeout_s=120) == 49
    [worker] = cloud.json("fn", "workers", "far-square")["items"]
    assert cloud.json("alloc", "show", worker["allocation_id"])["node_id"] == node
    cloud.ok("fn", "delete", "far-square")


def test_a_second_node_joins_by_the_guide_and_its_upgrade_loses_no_work(cloud: Cloud, tmp_path: Path) -> None:
    up, enroll, join = steps("A second node")
    with two_hosts() as (here, elsewhere):
        cloud = replace(cloud, prefix=here)
        assert up.split()[:2] == ["penstock", "up"]
        cloud.ok(*up.replace("10.0.0.1", CONTROL).split()[1:], *cloud.port_options(), timeout_s=240)
        made = cloud.json(*enroll.split()[1:])
        told = made["command"].replace(made["token"], "…").replace(CONTROL, "10.0.0.1")
        assert re.sub(r":\d+ ", ":8080 ", told) == join
        data, name = tmp_path / "elsewhere", made["node_name"]
        command = made["command"].replace(" penstock ", f" exec {' '.join(Cloud(data).command())} ", 1)
        try:
            with agent(cloud, elsewhere, command, data):
                node = until_ready(cloud, name)
                [local] = [n["id"] for n in cloud.json("node", "list")["items"] if n["name"] == "local"]
                cloud.json("node", "cordon", local)
                allocation = cloud.json("alloc", "create", "--sku", "g1.1", "--wait", timeout_s=90)
                assert allocation["node_id"] == node
                serves_a_function(cloud, node, tmp_path / "app" / "far.py")
                assert cloud.ok("alloc", "exec", allocation["id"], "--", "sh", "-c", "echo kept > ~/work") == ""
                unit = cloud.ok("alloc", "exec", allocation["id"], "--", "stat", "-c", "%Y", "/proc/1")
            # The agent is stopped, as for its upgrade; what it runs goes on.
            with agent(cloud, elsewhere, command, data):
                assert until_answered(cloud, allocation["id"], "cat ~/work; stat -c %Y /proc/1") == f"kept\n{unit}"
                assert cloud.json("alloc", "release", allocation["id"], "--wait", timeout_s=90)["state"] == "released"
                cloud.json("node", "drain", node, "--wait")
                assert cloud.json("node", "retire", node)["state"] == "retired"
        finally:
            for pid in processes_of(data):
                os.kill(pid, signal.SIGKILL)

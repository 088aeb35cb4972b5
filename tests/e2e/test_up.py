"""`penstock up` from an empty folder to a rented GPU, and through everything that can end it."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import Servers
from e2e.cloud import SIMULATED_GPUS, Cloud, processes_of

pytestmark = pytest.mark.timeout(300)
CONTROL = ("relay", "worker", "biller", "activator", "api", "gateway")


def eventually(check: Callable[[], object], *, within_s: float) -> None:
    """Fail when `check` is not true in time."""
    deadline = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


@contextmanager
def foreground(cloud: Cloud) -> "Iterator[subprocess.Popen[str]]":
    """`penstock up` as in a terminal of its own."""
    with subprocess.Popen(
        cloud.command("up", *cloud.port_options()),
        env=cloud.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as up:
        try:
            yield up
        finally:
            up.kill()


def rent(cloud: Cloud) -> str:
    """An active allocation's id."""
    allocation = cloud.json("alloc", "create", "--sku", "g1.1", "--wait", timeout_s=90)
    assert allocation["state"] == "active"
    return allocation["id"]


def test_a_gpu_is_rented_used_and_released(stack: Cloud) -> None:
    allocation = rent(stack)
    assert stack.ok("alloc", "exec", allocation, "--", "python3", "-c", "print(6 * 7)") == "42\n"
    assert stack.json("alloc", "release", allocation, "--wait", timeout_s=90)["state"] == "released"


def test_status_names_every_process_and_where_people_connect(stack: Cloud) -> None:
    status = stack.json("status")
    assert status["ready"] is True
    assert status["api"] == f"http://127.0.0.1:{stack.ports[0]}"
    assert status["gateway"] == f"http://127.0.0.1:{stack.ports[1]}"
    names = {entry["name"] for entry in status["processes"]}
    assert names == {"postgres", "nats", "temporal", *CONTROL, "agent", "sidecar"}
    assert all(Path(f"/proc/{entry['pid']}").exists() for entry in status["processes"])


def test_the_key_is_found_and_the_gpus_say_that_they_are_simulated(stack: Cloud) -> None:
    assert stack.json("whoami")["operator"] is True
    nodes = stack.json("node", "list")["items"]
    assert [(node["simulated"], node["gpus_total"]) for node in nodes] == [(True, SIMULATED_GPUS)]


def test_a_second_up_on_the_same_folder_is_refused(stack: Cloud) -> None:
    refused = stack.run("up", "--detach")
    assert refused.returncode == 5
    assert f"{stack.data} is in use by another `penstock up` (pid {stack.instance['pid']})" in refused.stderr
    assert stack.status()["ready"] is True


def test_nothing_in_the_folder_can_be_read_by_others(stack: Cloud) -> None:
    assert stack.data.stat().st_mode & 0o077 == 0
    for name in ("instance.json", "status.json", "admin.key", "postgres.password"):
        assert (stack.data / name).stat().st_mode & 0o077 == 0, name


def test_the_agent_is_given_no_platform_credential(stack: Cloud) -> None:
    environment = Path(f"/proc/{stack.pid_of('agent')}/environ").read_text()
    for name in ("DATABASE_URL", "NATS_URL", "TEMPORAL_ADDRESS", "PKI_DIR", "SECRETS_DIR"):
        assert f"PENSTOCK_{name}=" not in environment


def test_every_process_that_is_killed_comes_back_and_the_cloud_works(stack: Cloud) -> None:
    before = {entry["name"]: entry["pid"] for entry in stack.status()["processes"]}
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)

    def recovered() -> bool:
        status = stack.status()
        fresh = [entry["restarts"] >= 1 and entry["pid"] != before[entry["name"]] for entry in status["processes"]]
        return status["ready"] and all(fresh)

    eventually(recovered, within_s=90)
    eventually(lambda: stack.run("node", "list", "--state", "ready").stdout.count("local") == 1, within_s=30)
    assert stack.json("alloc", "release", rent(stack), "--wait", timeout_s=90)["state"] == "released"


def links_made(cloud: Cloud) -> int:
    """How often the node has linked, by its own log."""
    return (cloud.data / "log" / "agent.log").read_text(errors="replace").count("link_up")


def listens(port: int) -> bool:
    """Whether anything takes connections there."""
    with socket.socket() as dialled:
        return dialled.connect_ex(("127.0.0.1", port)) == 0


def test_after_a_gateways_restart_its_node_is_back_within_two_seconds_and_commands_wait(stack: Cloud) -> None:
    allocation = rent(stack)
    linked, gateway = links_made(stack), stack.pid_of("gateway")
    os.kill(gateway, signal.SIGKILL)
    command = stack.command("alloc", "exec", "-n", allocation, "--", "echo", "waited")
    with subprocess.Popen(command, env=stack.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asked:
        eventually(lambda: not listens(stack.ports[2]), within_s=5)
        eventually(lambda: listens(stack.ports[2]), within_s=60)
        since = time.monotonic()
        eventually(lambda: links_made(stack) > linked, within_s=30)
        took_s = time.monotonic() - since
        output, errors = asked.communicate(timeout=60)
    assert (asked.returncode, output) == (0, b"waited\n"), errors
    assert took_s < 2.0
    assert stack.json("alloc", "release", allocation, "--wait", timeout_s=90)["state"] == "released"


def test_a_killed_install_goes_on_without_what_nats_and_temporal_kept_and_ctrl_c_leaves_nothing(cloud: Cloud) -> None:
    cloud.up()
    key, kept, nodes = cloud.key, rent(cloud), cloud.json("node", "list")["items"]
    children = {entry["pid"] for entry in cloud.status()["processes"]}
    assert children <= set(processes_of(cloud.data))

    os.kill(cloud.instance["pid"], signal.SIGKILL)
    eventually(lambda: not children & set(processes_of(cloud.data)), within_s=30)
    assert cloud.run("status").returncode == 2
    shutil.rmtree(cloud.data / "nats")
    shutil.rmtree(cloud.data / "temporal")

    with foreground(cloud) as up:
        eventually(lambda: cloud.status()["ready"], within_s=120)
        assert cloud.key == key
        assert [node["id"] for node in cloud.json("node", "list")["items"]] == [node["id"] for node in nodes]
        # The unit outlived its supervisor and was adopted.
        assert cloud.ok("alloc", "exec", kept, "--", "echo", "still here") == "still here\n"
        assert cloud.json("alloc", "release", kept, "--wait", timeout_s=90)["state"] == "released"
        rent(cloud)
        os.killpg(up.pid, signal.SIGINT)
        output, _ = up.communicate(timeout=90)
    assert up.returncode == 0, output
    for words in (
        "Penstock is ready.",
        "alloc create --sku g1.1 --name demo --wait",
        "SIMULATED",
        "everything has stopped",
    ):
        assert words in output
    assert processes_of(cloud.data) == {}
    assert cloud.status() == {"ready": False, "api": "", "gateway": "", "processes": []}


def test_two_signals_while_it_starts_leave_nothing(cloud: Cloud) -> None:
    with foreground(cloud) as up:
        eventually(lambda: len(processes_of(cloud.data)) > 6, within_s=60)
        os.killpg(up.pid, signal.SIGINT)
        time.sleep(0.1)
        os.killpg(up.pid, signal.SIGINT)
        began = time.monotonic()
        output, _ = up.communicate(timeout=30)
    assert time.monotonic() - began < 10, output
    assert processes_of(cloud.data) == {}


async def test_servers_named_by_the_environment_are_used_and_none_is_started(
    cloud: Cloud, servers: Servers, database_url: str
) -> None:
    given = {
        "PENSTOCK_DATABASE_URL": database_url,
        "PENSTOCK_NATS_URL": servers.nats_url,
        "PENSTOCK_TEMPORAL_ADDRESS": servers.temporal_address,
    }
    outside = Cloud(cloud.data, given, cloud.ports)
    outside.up()
    names = {entry["name"] for entry in outside.status()["processes"]}
    assert names == {*CONTROL, "agent", "sidecar"}
    assert not (outside.data / "postgres").exists()
    assert outside.json("alloc", "release", rent(outside), "--wait", timeout_s=90)["state"] == "released"
    outside.down()


@pytest.mark.skipif(os.geteuid() != 0, reason="the suite itself runs as an ordinary user")
def test_an_ordinary_user_can_run_it_all(cloud: Cloud) -> None:
    ordinary = replace(cloud, prefix=("unshare", "--user", "--map-user=1000", "--map-group=1000"))
    ordinary.up()
    allocation = rent(ordinary)
    assert ordinary.ok("alloc", "exec", allocation, "--", "python3", "-c", "print(6 * 7)") == "42\n"
    assert ordinary.json("alloc", "release", allocation, "--wait", timeout_s=90)["state"] == "released"
    uids = {Path(f"/proc/{pid}/uid_map").read_text().split()[0] for pid in processes_of(cloud.data)}
    assert uids == {"1000"}


def test_a_port_that_was_asked_for_and_is_taken_is_named(cloud: Cloud) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = cloud.run("up", "--detach", "--api-port", str(port))
    assert refused.returncode == 2
    assert f"port {port}, wanted for the api, is in use" in refused.stderr


def test_down_without_up_is_no_error(cloud: Cloud) -> None:
    assert cloud.run("down").returncode == 0
    assert cloud.run("status").returncode == 2

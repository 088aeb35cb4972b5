"""The command line and the client library against the whole running cloud."""

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import penstock
from e2e.cloud import Cloud
from penstock.kit.ids import new_id
from penstock.sdk import errors
from penstock.sdk.client import AsyncClient, Client

pytestmark = pytest.mark.timeout(300)


@contextmanager
def rented(stack: Cloud, *options: str) -> Iterator[str]:
    """An active allocation's id, released at the end."""
    allocation = stack.json("alloc", "create", "--sku", "g1.1", "--wait", *options, timeout_s=90)["id"]
    try:
        yield allocation
    finally:
        stack.ok("alloc", "release", allocation, "--wait", timeout_s=90)


@pytest.fixture(scope="module")
def unit(stack: Cloud) -> Iterator[str]:
    """One allocation for tests that only run commands in it."""
    with rented(stack) as allocation:
        yield allocation


def eventually(check: Callable[[], object], *, within_s: float) -> None:
    """Fail when `check` is not true in time."""
    deadline = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def project_key(stack: Cloud, role: str, project: str) -> tuple[str, str]:
    """A new key's id and secret."""
    made = stack.json("key", "create", f"{role}-{os.urandom(3).hex()}", "--role", role, "-p", project)
    return made["key"]["id"], made["secret"]


def with_key(stack: Cloud, secret: str) -> Cloud:
    """The same cloud, used by somebody else."""
    return Cloud(stack.data, {"PENSTOCK_API_KEY": secret}, stack.ports)


def test_progress_is_told_in_lines_and_the_result_is_json(stack: Cloud) -> None:
    done = stack.run("alloc", "create", "--sku", "g1.1", "--name", "lines", "--wait", "-o", "json", timeout_s=90)
    assert done.returncode == 0, done.stderr
    allocation = json.loads(done.stdout)
    told = [line.split()[1] for line in done.stderr.splitlines()]
    # Who looks now and then may miss the moment in between.
    assert told in (["requested", "provisioning", "active"], ["requested", "active"])
    shown = stack.ok("alloc", "show", allocation["id"])
    assert all(word in shown for word in ("lines", "requested", "provisioning", "active", "(simulated)", "$3.49"))
    assert stack.json("alloc", "list", "--name", "lines", "--state", "active")["items"][0]["id"] == allocation["id"]
    released = stack.run("alloc", "release", allocation["id"], "--wait", timeout_s=90)
    assert [line.split()[1].rstrip(":") for line in released.stderr.splitlines()] == ["releasing", "released"]


def test_a_command_has_its_input_output_code_and_variables(stack: Cloud, unit: str) -> None:
    program = "import os, sys; print(sys.stdin.read()[::-1], os.environ['A'], os.getcwd()); sys.exit('bye')"
    line = ("alloc", "exec", "--env", "A=b=c", "--cwd", "/tmp", unit, "--", "python3", "-c", program)
    done = stack.run(*line, stdin="abc")
    assert (done.returncode, done.stdout, done.stderr) == (1, "cba b=c /tmp\n", "bye\n")
    assert stack.run("alloc", "exec", unit, "--", "python3", "-c", "import sys; sys.exit(42)").returncode == 42


def test_large_input_comes_back_unchanged(stack: Cloud, unit: str) -> None:
    data = os.urandom(8 << 20)
    command = stack.command("alloc", "exec", unit, "--", "cat")
    done = subprocess.run(command, env=stack.environment(), input=data, capture_output=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout == data


def test_a_reader_that_leaves_ends_the_command_with_141(stack: Cloud, unit: str) -> None:
    command = stack.command("alloc", "exec", unit, "--", "yes", "reader-left")
    child = subprocess.Popen(
        command, env=stack.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stderr is not None
    assert child.stdout.readline() == b"reader-left\n"
    child.stdout.close()
    assert child.wait(30) == 141
    assert child.stderr.read() == b""
    child.stderr.close()
    eventually(lambda: not runs(stack, unit, "reader-left"), within_s=30)


@pytest.mark.parametrize("stdin", ["at its end", "open"])
def test_interrupting_kills_the_command_in_the_unit(stack: Cloud, unit: str, stdin: str) -> None:
    mark = f"interrupt-{os.urandom(4).hex()}"
    program = f"import time; print('on', flush=True); time.sleep(1000) #{mark}"
    child = subprocess.Popen(
        stack.command("alloc", "exec", unit, "--", "python3", "-c", program),
        env=stack.environment(),
        stdin=subprocess.DEVNULL if stdin == "at its end" else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"on\n"
    assert runs(stack, unit, mark)
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=30)
    assert (child.returncode, error) == (130, b"")
    eventually(lambda: not runs(stack, unit, mark), within_s=30)


def runs(stack: Cloud, unit: str, mark: str) -> bool:
    """Whether a process of the unit has this in its command line."""
    program = (
        "import glob, os\n"
        "for path in glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    try: text = open(path).read()\n"
        "    except OSError: continue\n"
        "    if str(os.getpid()) not in path: print(text.replace(chr(0), ' '))\n"
    )
    return mark in stack.ok("alloc", "exec", "-n", unit, "--", "python3", "-c", program)


def test_another_tenants_allocation_is_not_found(stack: Cloud, unit: str) -> None:
    project = stack.json("project", "create", f"other-{os.urandom(3).hex()}")["id"]
    stranger = with_key(stack, project_key(stack, "developer", project)[1])
    for line in (["show", unit], ["release", unit], ["exec", unit, "--", "true"]):
        missing = new_id("alc")
        known, unknown = stranger.run("alloc", *line), stranger.run("alloc", line[0], missing, *line[2:])
        assert (known.returncode, unknown.returncode) == (4, 4)
        said = known.stderr.replace(unit, missing).partition("correlation")[0]
        assert said == unknown.stderr.partition("correlation")[0]


def test_a_role_that_is_too_low_and_a_revoked_key_exit_with_3(stack: Cloud) -> None:
    key_id, secret = project_key(stack, "viewer", "prj_default")
    viewer = with_key(stack, secret)
    denied = viewer.run("alloc", "create", "--sku", "g1.1")
    assert (denied.returncode, "code=compute.policy" in denied.stderr) == (3, True)
    stack.ok("key", "revoke", key_id)
    eventually(lambda: viewer.run("whoami").returncode == 3, within_s=5)
    assert "login again" in viewer.run("whoami").stderr


def test_refusals_say_why_by_code_and_exit(stack: Cloud, unit: str) -> None:
    cases = [
        (1, "compute.unknown_sku", ["alloc", "create", "--sku", "no-such"]),
        (1, "field=labels", ["alloc", "create", "--sku", "g1.1", "--label", "Bad Key=1"]),
        (4, "not_found", ["alloc", "show", new_id("alc")]),
        (4, "not_found", ["node", "show", new_id("nod")]),
        (4, "not_found", ["key", "revoke", new_id("key")]),
        (4, "not_found", ["dead-letters", "requeue", new_id("evt")]),
    ]
    for code, says, line in cases:
        done = stack.run(*line)
        assert (done.returncode, done.stdout) == (code, ""), (line, done.stderr)
        assert says in done.stderr
        assert done.stderr.count("\n") == 1


def test_the_life_of_an_allocation_is_followed_live(stack: Cloud) -> None:
    follower = subprocess.Popen(
        stack.command("events", "--follow", "-o", "json"), env=stack.environment(), stdout=subprocess.PIPE
    )
    try:
        time.sleep(2)
        with rented(stack) as allocation:
            pass
        assert follower.stdout is not None
        mine: list[str] = []
        for line in follower.stdout:
            event = json.loads(line)
            if event["aggregate_id"] == allocation:
                mine.append(event["event_type"])
                if event["event_type"] == "provisioning.releasing.completed":
                    break
    finally:
        follower.send_signal(signal.SIGINT)
        assert follower.wait(20) == 130
        assert follower.stdout is not None
        follower.stdout.close()
    assert mine[0] == "provisioning.requested"
    assert [name for name in mine if name in ("provisioning.active", "provisioning.releasing.requested")] == [
        "provisioning.active",
        "provisioning.releasing.requested",
    ]
    past = [item["event_type"] for item in stack.json("events", "--aggregate", allocation)["items"]]
    assert past == mine
    actions = {item["action"] for item in stack.json("audit", "list", "--target", allocation)["items"]}
    assert {"allocations.create", "allocations.release"} <= actions


def test_the_evidence_of_a_request_is_complete(stack: Cloud) -> None:
    allocation = stack.json("alloc", "create", "--sku", "g1.1", "--wait")["id"]
    stack.json("alloc", "release", allocation, "--wait")
    rows = stack.json("audit", "list", "--target", allocation, "--action", "allocations.create")["items"]
    found = stack.json("evidence", rows[0]["correlation_id"])
    assert [entry["action"] for entry in found["audit"]] == ["allocations.create"]
    assert {"provisioning.requested", "provisioning.active"} <= {event["event_type"] for event in found["events"]}
    assert ("unit.start", "succeeded") in {(task["type"], task["state"]) for task in found["tasks"]}
    assert "start_unit" in {step["detail"] for step in found["sagas"]}
    assert found["missing"] == []
    assert {"worker", "agent"} & {line["process"] for line in found["logs"]}
    shown = stack.run("evidence", rows[0]["correlation_id"])
    assert {"audit", "event", "task", "saga", "log"} <= {line.split()[2] for line in shown.stdout.splitlines()[1:]}
    assert stack.run("evidence", "cor_unknown").returncode == 4


def test_the_audit_log_verifies_on_this_machine_and_offline(stack: Cloud, tmp_path: Path) -> None:
    deadline = time.monotonic() + 30
    while any(chain["unlinked"] for chain in stack.json("audit", "chains")["items"]):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    anchor, export = tmp_path / "anchor.json", tmp_path / "audit.jsonl"
    anchor.write_text(json.dumps(stack.json("audit", "chains")))
    assert all(found["holds"] for found in stack.json("audit", "verify", "--anchor", str(anchor))["items"])
    assert stack.run("audit", "export", "--file", str(export)).returncode == 0
    assert stack.run("audit", "verify", "--file", str(export)).returncode == 0
    lines = export.read_text().splitlines()
    export.write_text("\n".join([lines[0].replace('"actor_kind":"', '"actor_kind":"x'), *lines[1:]]) + "\n")
    refused = stack.run("audit", "verify", "--file", str(export))
    assert (refused.returncode, "was changed" in refused.stdout) == (5, True)


def test_a_cordoned_node_takes_nothing_new(stack: Cloud) -> None:
    node = stack.json("node", "list")["items"][0]["id"]
    assert stack.json("node", "cordon", node, "--reason", "test")["state"] == "cordoned"
    try:
        refused = stack.run("alloc", "create", "--sku", "g1.1")
        assert (refused.returncode, "code=compute.unhealthy" in refused.stderr) == (7, True)
    finally:
        assert stack.json("node", "uncordon", node)["state"] == "ready"


def test_the_blocking_client_does_everything(stack: Cloud) -> None:
    with penstock.Client(stack.api, stack.key) as client:
        assert client.whoami().operator
        made = client.allocations.create("g1.1", labels={"by": "client"})
        assert client.allocations.wait(made.id).state == "active"
        try:
            done = client.allocations.exec(made.id, ["python3", "-c", "print(input())"], stdin=b"hello")
            assert (done.exit_code, done.stdout) == (0, b"hello\n")
            assert [item.id for item in client.allocations.list(labels={"by": "client"}, state="active")] == [made.id]
            assert client.allocations.update(made.id, name="renamed").name == "renamed"
        finally:
            client.allocations.release(made.id)
        assert client.allocations.wait(made.id, until={"released"}).state == "released"
        with pytest.raises(errors.Conflict):
            client.allocations.exec(made.id, ["true"])


async def test_the_asynchronous_client_does_the_same_many_times_at_once(stack: Cloud) -> None:
    async with penstock.AsyncClient(stack.api, stack.key) as client:
        codes = await asyncio.gather(*(_cycle(client, number) for number in range(8)))
    assert codes == list(range(8))


async def _cycle(client: AsyncClient, number: int) -> int:
    made = await client.allocations.create("g1.1")
    assert (await client.allocations.wait(made.id)).state == "active"
    try:
        done = await client.allocations.exec(made.id, ["python3", "-c", f"raise SystemExit({number})"])
    finally:
        await client.allocations.release(made.id)
    assert (await client.allocations.wait(made.id, until={"released"})).state == "released"
    return done.exit_code


def test_every_page_of_a_list_is_read(stack: Cloud) -> None:
    with Client(stack.api, stack.key) as client:
        for number in range(7):
            client.projects.create(f"paged-{number}")
        everything = [project.id for project in client.projects.list()]
        assert len(everything) == len(set(everything)) >= 8
        first = [project.id for project in client.projects.list(limit=3)]
    assert first == [*takewhile(lambda project: project != everything[3], everything)]


@contextmanager
def holding(url: str) -> Iterator[tuple[str, threading.Event]]:
    """A proxy that passes requests on and holds back the answers to a POST; the event says that one came."""
    parts, held, sockets = urlsplit(url), threading.Event(), list[socket.socket]()
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_on(source: socket.socket, sink: socket.socket, posts: threading.Event, *, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if data.startswith(b"POST "):
                    posts.set()
                if answers and posts.is_set():
                    held.set()
                    return
                sink.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection((str(parts.hostname), parts.port))
                sockets.extend((client, server))
                posts = threading.Event()
                for source, sink, answers in ((client, server, False), (server, client, True)):
                    options = {"answers": answers}
                    threading.Thread(target=pass_on, args=(source, sink, posts), kwargs=options, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", held
    finally:
        for each in (listener, *sockets):
            each.close()


def interrupted(stack: Cloud, line: list[str], held: threading.Event, env: dict[str, str]) -> str:
    """What a command says when Ctrl-C comes while its request is held; then what it printed as the ending command."""
    command = stack.command(*line)
    child = subprocess.Popen(
        command, env={**stack.environment(), **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert held.wait(60)
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=30)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 130, said
    assert "Traceback" not in said
    return said.rpartition("this ends it: penstock ")[2].strip()


def test_ctrl_c_while_a_create_is_held_prints_the_command_that_ends_it(stack: Cloud) -> None:
    with holding(stack.api) as (url, held):
        env = {"PENSTOCK_API_URL": url, "PENSTOCK_API_KEY": stack.key}
        ending = interrupted(stack, ["alloc", "create", "--sku", "g1.1"], held, env)
    allocation = ending.split()[-1]
    assert stack.json("alloc", "show", allocation)["id"] == allocation
    assert stack.run(*shlex.split(ending), "--wait", timeout_s=90).returncode == 0
    assert stack.json("alloc", "show", allocation)["state"] == "released"


@pytest.mark.parametrize("options", [[], ["--async"]])
def test_ctrl_c_while_a_call_is_held_prints_the_command_that_ends_it(
    stack: Cloud, tmp_path: Path, options: list[str]
) -> None:
    file = tmp_path / "slow" / "slow.py"
    file.parent.mkdir()
    file.write_text(
        "import time\nimport penstock\napp = penstock.App('slow')\n"
        "@app.function(sku='g1.1')\ndef sleep():\n    time.sleep(120)\n"
    )
    stack.ok("fn", "deploy", str(file), "--no-wait", timeout_s=90)
    try:
        with holding(stack.api) as (api, at_api), holding(stack.gateway) as (gateway, at_gateway):
            env = {"PENSTOCK_API_URL": api, "PENSTOCK_GATEWAY_URL": gateway, "PENSTOCK_API_KEY": stack.key}
            if options:
                ending = interrupted(stack, ["fn", "invoke", "slow-sleep", *options], at_api, env)
            else:
                ending = interrupted_call(stack, at_gateway, env)
        invocation = ending.split()[-1]
        assert stack.json("fn", "status", invocation)["id"] == invocation
        assert stack.run(*shlex.split(ending)).returncode == 0
        eventually(lambda: stack.json("fn", "status", invocation)["state"] == "cancelled", within_s=60)
    finally:
        stack.ok("fn", "delete", "slow-sleep")


def interrupted_call(stack: Cloud, held: threading.Event, env: dict[str, str]) -> str:
    """The same for a call that is waited for: its answer comes when it ends, so it is enough that it was accepted."""
    known = {item["id"] for item in stack.json("fn", "invocations")["items"]}

    def accepted() -> bool:
        found = {item["id"] for item in stack.json("fn", "invocations")["items"]} - known
        return bool(found) and (held.set() or True)

    watching = threading.Thread(target=eventually, args=(accepted,), kwargs={"within_s": 60}, daemon=True)
    watching.start()
    return interrupted(stack, ["fn", "invoke", "slow-sleep"], held, env)

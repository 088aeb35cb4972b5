"""What each command asks the api for, and what it prints."""

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from penstock.cli import app as tree
from penstock.kit.ids import new_id
from scripted_api import ScriptedApi, error_answer, json_answer

from .answers import MOMENT, WHOAMI, allocation, page
from .conftest import KEY, Cli

ALC, NOD, PRJ, USR, SVA, KEYID, EVT, SLT = (
    f"{prefix}_{'0' * 26}" for prefix in ("alc", "nod", "prj", "usr", "sva", "key", "evt", "slt")
)
PROJECT = {"id": PRJ, "organisation_id": "org_default", "name": "research", "created_at": MOMENT}
QUOTA = {"project_id": PRJ, "gpus_max": 8, "gpus_used": 3}
MEMBER = {
    "principal_id": USR,
    "principal_kind": "user",
    "display_name": "Ada",
    "role": "viewer",
    "created_at": MOMENT,
}
ACCOUNT = {"id": SVA, "project_id": PRJ, "name": "ci", "role": "developer", "created_at": MOMENT}
USER = {"id": USR, "issuer": "https://id", "subject": "4711", "display_name": "Ada", "created_at": MOMENT}
ORGANISATION = {"id": "org_default", "name": "acme", "created_at": MOMENT}
KEY_ROW = {
    "id": KEYID,
    "name": "ci",
    "hint": "psk_abcd",
    "role": "developer",
    "principal_id": USR,
    "project_id": PRJ,
    "created_at": MOMENT,
    "expires_at": None,
    "revoked_at": None,
    "last_used_at": None,
}
GPU = {
    "slot_id": SLT,
    "uuid": "GPU-1",
    "index": 0,
    "model": "H100",
    "memory_bytes": 80 << 30,
    "simulated": True,
    "health": "healthy",
    "health_detail": "",
    "allocation_id": None,
}
NODE = {
    "id": NOD,
    "name": "rack1",
    "state": "ready",
    "state_reason": "",
    "simulated": True,
    "agent_version": "0.1.0",
    "gpus_total": 1,
    "gpus_free": 1,
    "labels": {},
    "last_heartbeat_at": MOMENT,
    "certificate_expires_at": None,
    "created_at": MOMENT,
    "gpus": [GPU],
}
TOKEN = {
    "token": "ent_x",
    "node_id": NOD,
    "node_name": "rack1",
    "kind": "enrol",
    "expires_at": MOMENT,
    "command": "penstock node join --token ent_x",
}
TASK = {
    "id": "tsk_1",
    "node_id": NOD,
    "type": "unit.start",
    "allocation_id": None,
    "state": "done",
    "fence": 1,
    "attempts": 1,
    "error_code": "",
    "detail": "",
    "created_at": MOMENT,
    "finished_at": None,
}
SKU = {
    "name": "g1.1",
    "description": "one",
    "gpu_model": "H100",
    "gpu_counts": [1, 8],
    "price_microusd_per_gpu_hour": 3_490_000,
    "memory_bytes_per_gpu": 64 << 30,
    "cpus_per_gpu": 16.0,
    "processes_max": 4096,
    "scratch_bytes": 10 << 30,
    "enabled": True,
    "gpus_free": 5,
}
EVENT = {
    "cursor": "c1",
    "event_id": EVT,
    "event_type": "provisioning.active",
    "aggregate_id": ALC,
    "version": 3,
    "project_id": PRJ,
    "correlation_id": "cor",
    "occurred_at": MOMENT,
    "payload": {"n": 1},
}
AUDIT = {
    "id": "aud_1",
    "at": MOMENT,
    "actor_id": USR,
    "actor_kind": "user",
    "action": "allocations.create",
    "target_id": ALC,
    "project_id": PRJ,
    "correlation_id": "cor",
    "detail": {},
}
LETTER = {
    "event_id": EVT,
    "event_type": "a.b",
    "aggregate_id": ALC,
    "version": 1,
    "occurred_at": MOMENT,
    "attempts": 9,
    "last_error": "refused",
}
ACTIVE = allocation("active", ALC)

#: Command line, method, path, answer, and (where one is sent) the body.
CASES: list[tuple[str, str, str, Any, Any]] = [
    ("whoami", "GET", "/whoami", WHOAMI, None),
    ("key list", "GET", "/keys", page([KEY_ROW]), None),
    (
        "key create ci --role viewer --expires-in 600",
        "POST",
        "/keys",
        {"key": KEY_ROW, "secret": "psk_secret"},
        {"name": "ci", "role": "viewer", "service_account_id": None, "expires_in_s": 600},
    ),
    (f"key revoke {KEYID}", "DELETE", f"/keys/{KEYID}", None, None),
    ("project list", "GET", "/projects", page([PROJECT]), None),
    ("project create research", "POST", "/projects", PROJECT, {"name": "research", "organisation_id": None}),
    (f"project show {PRJ}", "GET", f"/projects/{PRJ}", PROJECT, None),
    (f"project rename {PRJ} lab", "PATCH", f"/projects/{PRJ}", PROJECT, {"name": "lab"}),
    (f"project delete {PRJ}", "DELETE", f"/projects/{PRJ}", None, None),
    (f"project quota {PRJ}", "GET", f"/projects/{PRJ}/quota", QUOTA, None),
    (f"project quota {PRJ} --gpus-max 8", "PUT", f"/projects/{PRJ}/quota", QUOTA, {"gpus_max": 8}),
    (f"project members {PRJ}", "GET", f"/projects/{PRJ}/members", page([MEMBER]), None),
    (f"member list {PRJ}", "GET", f"/projects/{PRJ}/members", page([MEMBER]), None),
    (f"member set {PRJ} {USR} --role viewer", "PUT", f"/projects/{PRJ}/members/{USR}", MEMBER, {"role": "viewer"}),
    (f"member remove {PRJ} {SVA}", "DELETE", f"/projects/{PRJ}/members/{SVA}", None, None),
    ("service-account list", "GET", "/service-accounts", page([ACCOUNT]), None),
    (
        "service-account create ci --role viewer",
        "POST",
        "/service-accounts",
        ACCOUNT,
        {"name": "ci", "role": "viewer"},
    ),
    (f"service-account delete {SVA}", "DELETE", f"/service-accounts/{SVA}", None, None),
    ("user list", "GET", "/users", page([USER]), None),
    (
        "user create Ada --issuer https://id --subject 4711",
        "POST",
        "/users",
        USER,
        {"issuer": "https://id", "subject": "4711", "display_name": "Ada"},
    ),
    ("org list", "GET", "/organisations", page([ORGANISATION]), None),
    ("org create acme", "POST", "/organisations", ORGANISATION, {"name": "acme"}),
    (
        "node enroll rack1 --gpus 8",
        "POST",
        "/nodes/enrolment-tokens",
        TOKEN,
        {"node_name": "rack1", "gpus_approved": 8},
    ),
    (f"node recover {NOD}", "POST", f"/nodes/{NOD}/recovery-tokens", TOKEN, None),
    ("node list --state ready", "GET", "/nodes", page([NODE]), None),
    (f"node show {NOD}", "GET", f"/nodes/{NOD}", NODE, None),
    (f"node tasks {NOD}", "GET", f"/nodes/{NOD}/tasks", page([TASK]), None),
    *(
        (f"node {verb} {NOD} --reason why", "POST", f"/nodes/{NOD}/{verb}", NODE, {"reason": "why"})
        for verb in ("cordon", "uncordon", "drain", "revoke", "retire")
    ),
    (
        f"node force-cleanup {NOD} {SLT} --verified",
        "POST",
        f"/nodes/{NOD}/slots/{SLT}/force-cleanup",
        GPU,
        {"runtime_verified_absent": True, "reason": ""},
    ),
    ("sku list", "GET", "/skus", page([SKU]), None),
    ("sku show g1.1", "GET", "/skus/g1.1", SKU, None),
    (
        "sku set g1.1 --gpu-model H100 --price 3.49 --memory 64 --cpus 16 --count 1 --count 8 --disabled",
        "PUT",
        "/skus/g1.1",
        SKU,
        {
            "description": "",
            "gpu_model": "H100",
            "gpu_counts": [1, 8],
            "price_microusd_per_gpu_hour": 3_490_000,
            "memory_bytes_per_gpu": 64 << 30,
            "cpus_per_gpu": 16.0,
            "processes_max": 4096,
            "scratch_bytes": 10 << 30,
            "enabled": False,
        },
    ),
    (
        "alloc create --sku g1.1 --gpus 2 --name n --label a=1 --env A=b=c --image i --port 80 --wait-capacity 5",
        "POST",
        "/allocations",
        ACTIVE,
        {
            "sku": "g1.1",
            "gpus": 2,
            "name": "n",
            "image": "i",
            "labels": {"a": "1"},
            "env": {"A": "b=c"},
            "command": [],
            "ports": [80],
            "wait_s": 5,
        },
    ),
    ("alloc list --state active --sku g1.1", "GET", "/allocations", page([ACTIVE]), None),
    (f"alloc show {ALC}", "GET", f"/allocations/{ALC}", ACTIVE, None),
    (f"alloc update {ALC} --label a=2", "PATCH", f"/allocations/{ALC}", ACTIVE, {"name": None, "labels": {"a": "2"}}),
    (f"alloc release {ALC} --reason done", "POST", f"/allocations/{ALC}/release", ACTIVE, {"reason": "done"}),
    ("events --type a.b", "GET", "/events", page([EVENT]), None),
    ("audit --action allocations.create", "GET", "/audit", page([AUDIT]), None),
    ("dead-letters list", "GET", "/dead-letters", page([LETTER]), None),
    (f"dead-letters requeue {EVT}", "POST", f"/dead-letters/{EVT}/requeue", None, None),
    (f"dead-letters discard {EVT}", "DELETE", f"/dead-letters/{EVT}", None, None),
]


def no_content() -> Callable[[web.Request], Any]:
    async def handle(_: web.Request) -> web.Response:
        return web.Response(status=204)

    return handle


@pytest.mark.parametrize("output", ["table", "json", "csv"])
@pytest.mark.parametrize(("line", "method", "path", "answer", "body"), CASES, ids=[case[0] for case in CASES])
def test_a_command_asks_and_prints(
    api: ScriptedApi,
    cli: Cli,
    capfd: pytest.CaptureFixture[str],
    line: str,
    method: str,
    path: str,
    answer: Any,
    body: Any,
    output: str,
) -> None:
    cli.logged_in(api)
    api.on(method, path, no_content() if answer is None else json_answer(answer))
    assert tree.run(tree.app, [*line.split(), "-o", output], cli.environ()) == 0, capfd.readouterr().err
    [seen] = api.seen
    assert (seen.method, seen.path) == (method, f"/api/v1{path}")
    assert seen.headers["authorization"] == f"Bearer {KEY}"
    assert (json.loads(seen.body) if seen.body else None) == body
    printed = capfd.readouterr().out
    if output == "json" and answer is not None:
        assert json.loads(printed) == answer


def test_options_may_stand_before_and_after_and_the_later_wins(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    api.on("GET", "/projects", json_answer(page([PROJECT])))
    assert tree.run(tree.app, ["-o", "json", "-p", "prj_default", "project", "-p", PRJ, "list"], cli.environ()) == 0
    assert json.loads(capfd.readouterr().out) == page([PROJECT])
    assert api.seen[0].headers["penstock-project"] == PRJ
    assert tree.run(tree.app, ["-o", "json", "project", "list", "--no-heading", "-o", "csv"], cli.environ()) == 0
    assert capfd.readouterr().out.startswith(f"{PRJ},research,")


def test_a_table_has_headings_unless_unwanted(api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    cli.logged_in(api)
    api.on("GET", "/projects", json_answer(page([PROJECT])))
    tree.run(tree.app, ["project", "list"], cli.environ())
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["id", PRJ]
    tree.run(tree.app, ["project", "list", "--no-heading"], cli.environ())
    assert [line.split() for line in capfd.readouterr().out.splitlines()] == [line.split() for line in lines[1:]]


def test_an_allocation_is_shown_with_addresses_and_timeline(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    api.on("GET", f"/allocations/{ALC}", json_answer(ACTIVE))
    tree.run(tree.app, ["alloc", "show", ALC], cli.environ())
    shown = capfd.readouterr().out
    for part in ("$3.49", "1 (simulated)", f"http://gateway.example/u/{ALC}/8000/", "because"):
        assert part in shown


@pytest.mark.parametrize(
    ("status", "code", "exit_code"),
    [
        (400, "invalid_request", 1),
        (403, "permission_denied", 3),
        (404, "not_found", 4),
        (409, "conflict", 5),
        (429, "compute.out_of_capacity", 1),
        (503, "unavailable", 2),
    ],
)
def test_each_refusal_has_its_exit_code(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str], status: int, code: str, exit_code: int
) -> None:
    cli.logged_in(api)
    api.on("POST", "/allocations", error_answer(status, code, "no", "sku", Retry_After="0"))
    arguments = ["alloc", "create", "--sku", "g1.1"]
    assert tree.run(tree.app, arguments, cli.environ()) == exit_code
    assert capfd.readouterr().err == f"error: no (code={code}, field=sku, correlation_id=cor_test)\n"
    assert tree.run(tree.app, [*arguments, "-o", "json"], cli.environ()) == exit_code
    error = {"message": "no", "code": code, "field": "sku", "correlation_id": "cor_test"}
    assert json.loads(capfd.readouterr().err) == {"error": error}


def test_waiting_for_what_fails_is_a_failure(api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    cli.logged_in(api)
    api.on("POST", "/allocations", json_answer(allocation("requested", ALC), 201))
    failed = allocation("failed", ALC) | {"reason": "node lost"}
    api.on("GET", f"/allocations/{ALC}", json_answer(failed))
    assert tree.run(tree.app, ["alloc", "create", "--sku", "g1.1", "--wait"], cli.environ()) == 2
    assert f"{ALC} is failed: node lost" in capfd.readouterr().err


def test_logging_in_tries_the_key_and_keeps_it_private(api: ScriptedApi, cli: Cli) -> None:
    api.on("GET", "/whoami", error_answer(401, "unauthenticated", "unknown key"), json_answer(WHOAMI))
    address = ("--api-url", api.url + "/api/v1/")
    refused = cli.run("login", *address, "--key-stdin", stdin="psk_wrong\n")
    assert refused.returncode == 3
    assert not cli.config.exists()
    done = cli.run("login", *address, "--key-stdin", "--gateway-url", "http://g.example/", stdin=KEY + "\n")
    assert done.returncode == 0, done.stderr
    assert KEY not in done.stdout + done.stderr
    assert cli.config.stat().st_mode & 0o777 == 0o600
    assert cli.source("api_url") == (api.url, "profile default")
    assert cli.source("gateway_url") == ("http://g.example", "profile default")
    assert KEY not in cli.run("config", "show").stdout
    assert cli.run("whoami").returncode == 0
    assert cli.run("logout").returncode == 0
    cli.fails(1, "whoami", says="run auth login")


def test_logging_in_without_a_terminal_says_how(cli: Cli) -> None:
    cli.fails(1, "login", says="--api-url")
    cli.fails(1, "login", "--api-url", "http://127.0.0.1:1", says="--key-stdin")
    cli.fails(1, "login", "--no-input", "--api-url", "http://127.0.0.1:1", says="--no-input was given")
    cli.fails(1, "login", "--api-url", "http://127.0.0.1:1", "--key-stdin", says="no key was given")


def test_a_project_is_used_from_then_on(api: ScriptedApi, cli: Cli) -> None:
    cli.logged_in(api)
    api.on("GET", f"/projects/{PRJ}", json_answer(PROJECT))
    assert cli.run("project", "use", PRJ).returncode == 0
    assert cli.source("project") == (PRJ, "profile default")
    cli.fails(4, "project", "use", new_id("prj"), says="not_found")
    assert cli.source("project") == (PRJ, "profile default")
    assert cli.run("project", "use", "--clear").returncode == 0
    assert cli.source("project") == (None, "not set")
    cli.fails(1, "project", "use", says="--clear")


def test_the_local_instance_is_found_and_its_key_shown(api: ScriptedApi, cli: Cli) -> None:
    folder = Path(cli.environ()["PENSTOCK_DATA"])
    cli.fails(1, "key", "show", says=f"no local instance in {folder}")
    folder.mkdir()
    instance = {"api": api.url, "gateway": api.url, "key": KEY, "pid": 1}
    (folder / "instance.json").write_text(json.dumps(instance))
    assert cli.run("key", "show").stdout == KEY + "\n"
    api.on("GET", "/whoami", json_answer(WHOAMI))
    assert cli.run("whoami", env={"PENSTOCK_DATA": "/nowhere"}).returncode == 1
    assert cli.run("whoami", "--data", str(folder), env={"PENSTOCK_DATA": "/nowhere"}).returncode == 0


def test_events_are_printed_as_they_come(api: ScriptedApi, cli: Cli) -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f"id: c1\ndata: {json.dumps(EVENT)}\n\n".encode())
        while True:
            await response.write(b": keep-alive\n\n")
            await asyncio.sleep(0.05)

    cli.logged_in(api)
    api.on("GET", "/events/stream", stream)
    child = subprocess.Popen(
        cli.command("events", "--follow", "--after", "c0", "-o", "json"),
        env=cli.environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert json.loads(child.stdout.readline()) == EVENT
    child.send_signal(2)
    _, error = child.communicate(timeout=20)
    assert (child.returncode, error) == (130, b"")


async def reverse(request: web.Request) -> web.StreamResponse:
    """Gives all input back in reverse, and its arguments on stderr."""
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    first = await socket.receive_json()
    data = b""
    async for message in socket:
        if isinstance(message.data, str):
            break
        data += message.data[1:]
    await socket.send_bytes(b"\x01" + data[::-1])
    await socket.send_bytes(b"\x02" + " ".join(first["argv"]).encode())
    await socket.send_str('{"type":"exit","code":42,"class":"exited"}')
    await socket.close()
    return socket


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_a_command_gets_input_and_gives_output_and_code(api: ScriptedApi, cli: Cli, separator: list[str]) -> None:
    cli.logged_in(api)
    api.on("GET", f"//ws/exec/{ALC}", reverse)
    line = ["alloc", "exec", "--env", "A=1", ALC, *separator, "python3", "-p", "x", "--help", "-o", "json"]
    done = cli.run(*line, stdin="abc" * 50_000)
    assert (done.returncode, done.stdout) == (42, "cba" * 50_000)
    assert done.stderr == "python3 -p x --help -o json"


def test_a_command_needs_a_gateway(api: ScriptedApi, cli: Cli) -> None:
    cli.logged_in(api)
    del cli.env["PENSTOCK_GATEWAY_URL"]
    cli.fails(1, "alloc", "exec", ALC, "--", "true", says="PENSTOCK_GATEWAY_URL")


def test_an_unencrypted_address_elsewhere_is_warned_of(cli: Cli) -> None:
    done = cli.run("whoami", "--api-url", "http://no-such-host.invalid", env={"PENSTOCK_API_KEY": KEY})
    assert "is not encrypted" in done.stderr


def test_a_reader_that_leaves_ends_a_command(api: ScriptedApi, cli: Cli) -> None:
    async def flood(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        while not socket.closed:
            await socket.send_bytes(b"\x01" + b"y\n" * 1000)
            await asyncio.sleep(0)
        return socket

    cli.logged_in(api)
    api.on("GET", f"//ws/exec/{ALC}", flood)
    child = subprocess.Popen(
        cli.command("alloc", "exec", "-n", ALC, "--", "yes"),
        env=cli.environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    assert child.stdout.readline() == b"y\n"
    child.stdout.close()
    assert child.wait(30) == 141
    assert child.stderr.read() == b""
    child.stderr.close()

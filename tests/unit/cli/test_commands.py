"""What each command asks the api for, and what it prints."""

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import openapi
from penstock.cli import app as tree
from penstock.cli import nodes
from penstock.kit.ids import is_id, new_id
from scripted_api import ScriptedApi, error_answer, json_answer

from .answers import WHOAMI, allocation, page
from .cases import ACTIVE, ALC, CASES, EVENT, GPU, NOD, NODE, PRJ, PROJECT, TOKEN
from .conftest import KEY, Cli


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
    assert seen.query.keys() <= openapi.query_parameters(seen.method, seen.path)
    assert seen.headers["authorization"] == f"Bearer {KEY}"
    sent = json.loads(seen.body) if seen.body else None
    if (method, path) == ("POST", "/allocations"):
        assert is_id("alc", sent.pop("id"))
    assert sent == body
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
        (412, "storage.object_exists", 5),
        (429, "compute.out_of_capacity", 7),
        (429, "billing.insufficient_funds", 7),
        (500, "internal", 2),
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
    told = capfd.readouterr().err.splitlines()[-1]
    assert told.startswith("error: no")
    assert told.endswith(f" (code={code}, field=sku, correlation_id=cor_test)")
    assert tree.run(tree.app, [*arguments, "-o", "json"], cli.environ()) == exit_code
    error = json.loads(capfd.readouterr().err.splitlines()[-1])["error"]
    assert error.pop("next", "see").startswith(("see", "`"))
    assert error == {"message": "no", "code": code, "field": "sku", "correlation_id": "cor_test"}


def test_waiting_for_what_fails_is_a_failure(api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    cli.logged_in(api)
    api.on("POST", "/allocations", json_answer(allocation("requested", ALC), 201))
    failed = allocation("failed", ALC) | {"reason": "node lost", "node_id": NOD}
    api.on("GET", f"/allocations/{ALC}", json_answer(failed))
    assert tree.run(tree.app, ["alloc", "create", "--sku", "g1.1", "--wait"], cli.environ()) == 1
    assert f"{ALC} is failed: node lost" in capfd.readouterr().err


def test_logging_in_tries_the_key_and_keeps_it_private(api: ScriptedApi, cli: Cli) -> None:
    api.on("GET", "/whoami", error_answer(401, "unauthenticated", "unknown key"), json_answer(WHOAMI))
    address = ("--api-url", api.url + "/api/v1/")
    refused = cli.run("login", *address, "--key-stdin", stdin="psk_wrong\n")
    assert refused.returncode == 3
    assert not cli.config.exists()
    done = cli.run("login", *address, "--key-stdin", "--gateway-url", "https://g.example/", stdin=KEY + "\n")
    assert done.returncode == 0, done.stderr
    assert KEY not in done.stdout + done.stderr
    assert cli.config.stat().st_mode & 0o777 == 0o600
    assert cli.source("api_url") == (api.url, "profile default")
    assert cli.source("gateway_url") == ("https://g.example", "profile default")
    assert KEY not in cli.run("config", "show").stdout
    assert cli.run("whoami").returncode == 0
    assert cli.run("logout").returncode == 0
    cli.fails(3, "whoami", says="run `penstock login`")


def test_logging_in_without_a_terminal_says_how(api: ScriptedApi, cli: Cli) -> None:
    cli.fails(1, "login", says="--api-url")
    api.on("GET", "/login", json_answer({"providers": []}))
    cli.fails(1, "login", "--api-url", api.url, says="--key-stdin")
    cli.fails(1, "login", "--no-input", "--api-url", api.url, says="--no-input was given")
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
    assert cli.run("whoami", env={"PENSTOCK_DATA": "/nowhere"}).returncode == 3
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


@pytest.mark.parametrize(
    "begin", [["--env", "A=1", ALC], ["--env", "A=1", ALC, "--"], [ALC, "--env", "A=1", "--"], ["--", ALC]]
)
def test_a_command_gets_input_and_gives_output_and_code(api: ScriptedApi, cli: Cli, begin: list[str]) -> None:
    cli.logged_in(api)
    api.on("GET", f"//ws/exec/{ALC}", reverse)
    done = cli.run("alloc", "exec", *begin, "python3", "-p", "x", "--help", "-o", "json", stdin="abc" * 50_000)
    assert (done.returncode, done.stdout) == (42, "cba" * 50_000)
    assert done.stderr == "python3 -p x --help -o json"


def test_the_api_names_the_gateway(api: ScriptedApi, cli: Cli) -> None:
    cli.logged_in(api)
    del cli.env["PENSTOCK_GATEWAY_URL"]
    api.on("GET", "/whoami", json_answer(WHOAMI | {"gateway_url": api.url}))
    api.on("GET", f"//ws/exec/{ALC}", reverse)
    assert cli.run("alloc", "exec", "-n", ALC, "--", "true").returncode == 42


@pytest.mark.parametrize(("message", "code"), [("No such file or directory", 127), ("Permission denied", 126)])
def test_what_cannot_be_run_is_named_and_ends_as_in_a_shell(
    api: ScriptedApi, cli: Cli, message: str, code: int
) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_json({"type": "error", "code": "access.not_runnable", "message": message})
        await socket.close(code=4400)
        return socket

    cli.logged_in(api)
    api.on("GET", f"//ws/exec/{ALC}", refuse)
    cli.fails(code, "alloc", "exec", "-n", ALC, "--", "nonexist", "x", says=f"cannot run 'nonexist': {message}")


def test_a_unit_gets_a_command_of_its_own(api: ScriptedApi, cli: Cli) -> None:
    cli.logged_in(api)
    api.on("POST", "/allocations", json_answer(ACTIVE, 201))
    line = ["alloc", "create", "--sku", "g1.1", "--", "python3", "-m", "http.server", "--port", "1"]
    assert tree.run(tree.app, line, cli.environ()) == 0
    assert json.loads(api.seen[0].body)["command"] == ["python3", "-m", "http.server", "--port", "1"]


def test_waiting_says_each_state_once(api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    states = ("requested", "requested", "provisioning", "provisioning", "active")
    cli.logged_in(api)
    api.on("POST", "/allocations", json_answer(allocation("requested", ALC), 201))
    api.on("GET", f"/allocations/{ALC}", *(json_answer(allocation(state, ALC)) for state in states))
    assert tree.run(tree.app, ["alloc", "create", "--sku", "g1.1", "--wait"], cli.environ()) == 0
    said = [f"{ALC} {state}" for state in ("requested", "provisioning", "active")]
    assert capfd.readouterr().err.splitlines() == said


def test_draining_says_each_count_once(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_DRAIN_LOOK_S", 0.01)
    cli.logged_in(api)
    held = [NODE | {"gpus": [GPU | {"gpu_uuid": str(at), "allocation_id": ALC} for at in range(n)]} for n in (2, 1, 0)]
    api.on("POST", f"/nodes/{NOD}/drain", json_answer(NODE))
    api.on("GET", f"/nodes/{NOD}", *(json_answer(found) for found in (held[0], held[0], held[1], held[1], held[2])))
    assert tree.run(tree.app, ["node", "drain", NOD, "--wait"], cli.environ()) == 0
    said = capfd.readouterr().err.splitlines()
    assert said == ["GPUs of rack1 still held: 2", "GPUs of rack1 still held: 1"]


@pytest.mark.parametrize("line", ["enroll rack1", f"recover {NOD}"])
@pytest.mark.parametrize(
    ("address", "hidden"),
    [
        ("http://127.0.0.1:8080", True),
        ("http://localhost:8080", True),
        ("http://[::1]:8080", True),
        ("https://127.0.0.1:8080", True),
        ("http://10.0.0.1:8080", False),
        ("https://cloud.example", False),
    ],
)
def test_an_address_that_no_other_host_reaches_is_told(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str], line: str, address: str, hidden: bool
) -> None:
    cli.logged_in(api)
    command = f"PENSTOCK_AGENT_ENROLMENT_TOKEN=ent_x penstock node join --api {address} --name rack1"
    for path in ("/nodes/enrolment-tokens", f"/nodes/{NOD}/recovery-tokens"):
        api.on("POST", path, json_answer(TOKEN | {"command": command}, 201))
    assert tree.run(tree.app, ["node", *line.split()], cli.environ()) == 0
    said = capfd.readouterr()
    assert said.out == f"{command}\n"
    assert ("no other host reaches" in said.err) is hidden
    assert ("penstock up --address" in said.err) is hidden


@pytest.mark.parametrize("host", ["no-such.invalid", "127.0.0.1.no-such.invalid", "localhost.no-such.invalid"])
def test_a_key_goes_over_plain_http_to_this_machine_only(cli: Cli, host: str) -> None:
    line = ["whoami", "--api-url", f"http://{host}"]
    cli.fails(1, *line, says=f"http://{host} is not encrypted", env={"PENSTOCK_API_KEY": KEY})
    for told in ([*line, "--insecure-http"], line):
        env = {"PENSTOCK_API_KEY": KEY, **({} if "--insecure-http" in told else {"PENSTOCK_ALLOW_HTTP": "1"})}
        cli.fails(2, *told, says=f"{host}", env=env)


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


def test_no_reason_is_cut_without_a_terminal_and_long_lists_have_lines_of_their_own(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    reason, uuids = "because " * 40 + "end", [f"GPU-{number:032}" for number in range(8)]
    found = {**ACTIVE, "reason": reason, "gpu_uuids": uuids}
    api.on("GET", "/allocations", json_answer(page([found])))
    api.on("GET", f"/allocations/{ALC}", json_answer(found))
    printed: dict[str, str] = {}
    for line in ("alloc list", "alloc list -o csv", f"alloc show {ALC}"):
        assert tree.run(tree.app, line.split(), cli.environ()) == 0
        printed[line] = capfd.readouterr().out
    assert reason in printed["alloc list"]
    assert reason in printed["alloc list -o csv"]
    assert reason in printed[f"alloc show {ALC}"]
    assert all(sum(uuid in line for uuid in uuids) <= 1 for line in printed[f"alloc show {ALC}"].splitlines())


def test_a_webhook_is_not_updated_to_nothing(api: ScriptedApi, cli: Cli) -> None:
    cli.fails(1, "webhook", "update", f"whk_{'0' * 26}", says="give --url, --event, --enable or --pause")
    assert api.seen == []

"""A command that ends before its time names what it may have left behind."""

import asyncio
import json
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from scripted_api import Handler, ScriptedApi, hang_up, json_answer

from .answers import allocation
from .conftest import Cli


def held(reached: threading.Event) -> Handler:
    """The request arrives, and its answer never comes."""

    async def handle(_: web.Request) -> web.StreamResponse:
        reached.set()
        await asyncio.sleep(120)
        raise web.HTTPGatewayTimeout

    return handle


def interrupted(cli: Cli, line: list[str], reached: threading.Event, number: int) -> "subprocess.CompletedProcess[str]":
    child = subprocess.Popen(
        cli.command(*line), env=cli.environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert reached.wait(60)
        child.send_signal(number)
        out, error = child.communicate(timeout=30)
    finally:
        child.kill()
        child.wait()
    return subprocess.CompletedProcess(line, child.returncode, out, error)


def sent_allocation(api: ScriptedApi) -> str:
    return json.loads(api.seen[-1].body)["id"]


def sent_invocation(api: ScriptedApi) -> str:
    return json.loads(api.seen[-1].body)["invocationID"]


def called_invocation(api: ScriptedApi) -> str:
    return api.seen[-1].headers["penstock-invocation-id"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(
    ("line", "path", "sent", "ends"),
    [
        (["alloc", "create", "--sku", "g1.1"], "/allocations", sent_allocation, "alloc release"),
        (["fn", "invoke", "shop-price"], "//f/shop-price", called_invocation, "fn cancel"),
        (["fn", "invoke", "shop-price", "--async"], "/serverless/invocations", sent_invocation, "fn cancel"),
        (["fn", "invoke", "shop-price", "--stream"], "/serverless/invocations", sent_invocation, "fn cancel"),
    ],
)
def test_the_id_and_the_command_that_ends_it_are_told(
    api: ScriptedApi,
    cli: Cli,
    line: list[str],
    path: str,
    sent: Callable[[ScriptedApi], str],
    ends: str,
    number: int,
    code: int,
) -> None:
    reached = threading.Event()
    cli.logged_in(api)
    api.on("POST", path, held(reached))
    done = interrupted(cli, ["-p", "prj_default", *line], reached, number)
    assert done.returncode == code, done.stderr
    assert done.stderr.endswith(f"this ends it: penstock -p prj_default {ends} {sent(api)}\n"), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_who_waits_no_longer_for_an_allocation_is_told_the_same(
    api: ScriptedApi, cli: Cli, number: int, code: int
) -> None:
    reached = threading.Event()
    cli.logged_in(api)

    async def make(request: web.Request) -> web.Response:
        chosen = (await request.json())["id"]
        api.on("GET", f"/allocations/{chosen}", held(reached))
        return web.json_response(allocation("requested", chosen), status=201)

    api.on("POST", "/allocations", make)
    done = interrupted(cli, ["alloc", "create", "--sku", "g1.1", "--wait"], reached, number)
    chosen = json.loads(api.seen[0].body)["id"]
    assert done.returncode == code, done.stderr
    assert done.stderr.endswith(f"{chosen} goes on and is charged; this ends it: penstock alloc release {chosen}\n"), (
        done.stderr
    )


@pytest.mark.parametrize("path", ["/allocations", "/serverless/invocations"])
def test_a_server_that_goes_away_in_the_middle_is_told_too(api: ScriptedApi, cli: Cli, path: str) -> None:
    cli.logged_in(api)
    api.on("POST", path, hang_up)
    line = ["alloc", "create", "--sku", "g1.1"] if path == "/allocations" else ["fn", "invoke", "f", "--async"]
    done = cli.run(*line)
    assert done.returncode == 2, done.stderr
    chosen = {json.loads(seen.body).get("id") or json.loads(seen.body)["invocationID"] for seen in api.seen}
    assert len(chosen) == 1
    assert f" {chosen.pop()}\n" in done.stderr


def test_the_printed_command_goes_to_the_same_place_by_the_same_way(api: ScriptedApi, cli: Cli) -> None:
    cli.logged_in(api)
    api.on("POST", "/allocations", hang_up)
    flags = ["--insecure-http", "--api-url", api.url, "-p", "prj_default"]
    done = cli.run(*flags, "alloc", "create", "--sku", "g1.1")
    [told] = [line for line in done.stderr.splitlines() if "this ends it: " in line]
    words = shlex.split(told.partition("this ends it: ")[2])
    chosen = json.loads(api.seen[0].body)["id"]
    api.on("POST", f"/allocations/{chosen}/release", json_answer(allocation("releasing", chosen)))
    assert "--insecure-http" in words
    assert cli.run(*words[1:]).returncode == 0
    assert (api.seen[-1].path, api.seen[-1].headers["penstock-project"]) == (
        f"/api/v1/allocations/{chosen}/release",
        "prj_default",
    )


def test_invoke_waits_as_long_as_it_says(api: ScriptedApi, cli: Cli) -> None:
    from .functioncases import INVOCATION

    cli.logged_in(api)

    async def accepted(request: web.Request) -> web.Response:
        wait_s = float(request.headers["Penstock-Wait"])
        assert 0 < wait_s <= 1.5
        await asyncio.sleep(wait_s)
        chosen = request.headers["Penstock-Invocation-Id"]
        running: dict[str, Any] = INVOCATION | {"id": chosen, "state": "running"}
        api.on("GET", f"/invocations/{chosen}", json_answer(running))
        return web.json_response({}, status=202, headers={"Penstock-Invocation-Id": chosen})

    api.on("POST", "//f/shop-price", accepted)
    done = cli.run("fn", "invoke", "shop-price", "--timeout", "1.5")
    assert done.returncode == 124, done.stderr
    chosen = api.seen[0].headers["penstock-invocation-id"]
    assert f"{chosen} is still running; it goes on: see `penstock fn status {chosen}`" in done.stderr
    assert f"end it with `penstock fn cancel {chosen}`" in done.stderr

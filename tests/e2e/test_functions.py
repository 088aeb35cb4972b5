"""Functions on the whole cloud: the source's own verification, every kind of function, and handlers that misbehave."""

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cloud import Cloud
from penstock.kit import bus
from waiting import attempts

APPS = Path(__file__).parent / "apps"
UNIT = {
    "operationID": "unit-sd-webui-001",
    "name": "sd-webui-template",
    "specName": "g1.1",
    "image": "python:3.12",
    "template": {"ports": [{"name": "http", "port": 8080}]},
    "access": {"primaryPort": "http", "scheme": "http"},
    "serverless": {
        "enabled": True,
        "requestID": "sd-webui",
        "minAvailableCount": 1,
        "idleTimeoutSeconds": 300,
        "minRequestCount": 0,
    },
}
INVOCATION = {
    "serverlessRequestID": "sd-webui",
    "mode": "async",
    "attributes": {"path": "/generate", "method": "POST"},
    "payload": {"prompt": "draw a robot"},
}


def curl(stack: Cloud, path: str, body: Any, *, method: str = "POST") -> Any:
    """As a person sends it; where curl is not there, the same by the standard library."""
    headers = {"Authorization": f"Bearer {stack.key}", "Content-Type": "application/json"}
    url, data = f"{stack.api}{path}", json.dumps(body)
    if shutil.which("curl"):
        options = [part for name, value in headers.items() for part in ("-H", f"{name}: {value}")]
        command = ["curl", "-s", "-X", method, url, *options, "-d", data]
        return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout or "null")
    request = urllib.request.Request(url, data.encode(), headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or "null")


def call(
    stack: Cloud,
    name: str,
    payload: Any,
    *,
    query: str = "",
    headers: dict[str, str] | None = None,
    timeout_s: float = 60,
) -> tuple[int, Any]:
    """`POST /f/<name>`: status and body."""
    request = urllib.request.Request(
        f"{stack.gateway}/f/{name}{query}",
        json.dumps(payload).encode(),
        {"Authorization": f"Bearer {stack.key}", "Content-Type": "application/json", **(headers or {})},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


async def _watch(url: str, subject: str, number: int) -> list[tuple[str, Any]]:
    """What a plain client sees there."""
    seen: list[tuple[str, Any]] = []
    async with bus.connect(url, name="watcher") as connected:
        subscription = await connected.client.subscribe(subject)
        watching.set()
        while len(seen) < number:
            message = await subscription.next_msg(timeout=60)
            seen.append((message.subject, json.loads(message.data)))
    return seen


watching = asyncio.Event()


async def test_the_sources_verification_works_word_for_word(stack: Cloud) -> None:
    url = next(
        line.partition(b"=")[2].decode()
        for line in Path(f"/proc/{stack.pid_of('activator')}/environ").read_bytes().split(b"\0")
        if line.startswith(b"PENSTOCK_NATS_URL=")
    )
    watching.clear()
    watcher = asyncio.create_task(_watch(url, "runtime.serverless.*.sd-webui.>", 1))
    others = asyncio.create_task(_watch(url, "runtime.serverless.*.sd-webui", 4))
    await watching.wait()
    made = await asyncio.to_thread(curl, stack, "/api/v1/gpu-units", UNIT)
    assert made["data"]["name"] == "sd-webui-template"
    assert made["data"]["serverless"]["requestID"] == "sd-webui"
    again = await asyncio.to_thread(curl, stack, "/api/v1/gpu-units", UNIT)
    assert again["data"]["createdAt"] == made["data"]["createdAt"]
    ack = (await asyncio.to_thread(curl, stack, "/api/v1/serverless/invocations", INVOCATION))["data"]
    assert (ack["subject"], ack["stream"]) == ("runtime.serverless.invoke.sd-webui", "WORK")
    assert ack["resultSubject"] == "runtime.serverless.result.sd-webui"
    (subject, dispatch), *_ = await watcher
    assert subject.startswith("runtime.serverless.dispatch.sd-webui.unit-sd-webui-worker-")
    assert (dispatch["invocationID"], dispatch["payload"]) == (ack["invocationID"], {"prompt": "draw a robot"})
    assert "replySubject" not in dispatch
    kinds = {subject.split(".")[2] for subject, _ in await others}
    assert kinds <= {"invoke", "metrics", "result"}
    async for _ in attempts():
        found = stack.json("fn", "status", ack["invocationID"])
        if found["state"] == "succeeded":
            break
    assert found["body"] == {"prompt": "draw a robot"}
    await asyncio.to_thread(curl, stack, "/api/v1/gpu-units/sd-webui-template", None, method="DELETE")


@pytest.fixture(scope="module")
def kinds(stack: Cloud) -> Iterator[Cloud]:
    """The cloud with functions of every kind."""
    stack.ok("fn", "deploy", str(APPS / "kinds.py"), timeout_s=120)
    yield stack
    for each in stack.json("fn", "list")["items"]:
        if each["name"].startswith("kinds-"):
            stack.ok("fn", "delete", each["name"])


@pytest.fixture(scope="module")
def app(kinds: Cloud) -> Any:
    """The same file, imported where people call from."""
    os.environ["PENSTOCK_API_URL"], os.environ["PENSTOCK_API_KEY"] = kinds.api, kinds.key
    os.environ["PENSTOCK_GATEWAY_URL"] = kinds.gateway
    import importlib.util

    spec = importlib.util.spec_from_file_location("kinds", APPS / "kinds.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in ("PENSTOCK_API_URL", "PENSTOCK_API_KEY", "PENSTOCK_GATEWAY_URL"):
        os.environ.pop(name)


def test_functions_are_called_like_functions(app: Any) -> None:
    assert app.square.remote(7) == 49
    assert app.square.local(7) == 49
    assert app.square.spawn(8).get(timeout=60) == 64
    assert list(app.square.map(range(20))) == [n * n for n in range(20)]
    assert list(app.count.stream(3)) == [{"number": n} for n in range(3)]
    assert app.flaky.remote() == 3
    assert app.outer.remote(5) == 26


def test_an_exception_comes_back_with_the_tenants_own_traceback(app: Any) -> None:
    with pytest.raises(ValueError, match="no luck") as caught:
        app.boom.remote("no luck")
    assert "kinds.py" in "".join(getattr(caught.value, "__notes__", [])) or "kinds.py" in str(caught.value.__cause__)


def test_a_model_is_loaded_once(app: Any) -> None:
    model = app.Model()
    assert model.when.remote() == model.when.remote()


def test_large_payloads_and_results_go_by_reference(kinds: Cloud) -> None:
    # In line, fetched from its row, and an object.
    for size in (100 << 10, 300 << 10, 19 << 20):
        status, told = call(kinds, "kinds-length", {"text": "x" * size})
        assert (status, told) == (200, size)
    status, text = call(kinds, "kinds-big", {"megabytes": 50}, timeout_s=120)
    assert (status, len(text)) == (200, 50 << 20)
    newest = kinds.json("fn", "invocations", "kinds-big")["items"][0]
    assert (newest["state"], newest["attempts"]) == ("succeeded", 1)
    status, refused = call(kinds, "kinds-length", {"text": "x" * (21 << 20)})
    assert (status, refused["error"]["field"]) == (400, "body")


def test_what_was_printed_is_kept_with_its_invocation(kinds: Cloud) -> None:
    _, ack = call(kinds, "kinds-square", {"x": 12}, query="?mode=async")
    for _ in range(200):
        lines = kinds.json("fn", "logs", "kinds-square", "--invocation", ack["invocationID"])["items"]
        if lines:
            break
        time.sleep(0.05)
    assert [line["text"].strip() for line in lines] == ["squaring 12"]


def test_a_running_invocation_is_cancelled(kinds: Cloud) -> None:
    _, ack = call(kinds, "kinds-slow", {"seconds": 600}, query="?mode=async")
    wait_for(kinds, ack["invocationID"], {"dispatching", "running"})
    kinds.ok("fn", "cancel", ack["invocationID"])
    assert wait_for(kinds, ack["invocationID"], {"cancelled"})["state"] == "cancelled"
    assert call(kinds, "kinds-slow", {"seconds": 0})[1] == "done"


def test_what_a_killed_worker_ran_is_run_elsewhere(kinds: Cloud) -> None:
    assert call(kinds, "kinds-slow", {"seconds": 0})[0] == 200
    _, ack = call(kinds, "kinds-slow", {"seconds": 6}, query="?mode=async")
    running = wait_for(kinds, ack["invocationID"], {"dispatching", "running"})
    worker = next(
        each for each in kinds.json("fn", "workers", "kinds-slow")["items"] if each["name"] == running["worker"]
    )
    kill_unit(kinds, worker["allocation_id"])
    ended = wait_for(kinds, ack["invocationID"], {"succeeded"}, timeout_s=60)
    assert (ended["attempts"], ended["body"]) == (2, "done")
    assert ended["worker"] != running["worker"]


def kill_unit(stack: Cloud, allocation_id: str) -> None:
    """kill -9 of everything in a unit."""
    script = "import os, signal; os.kill(-1, signal.SIGKILL)"
    stack.run("alloc", "exec", allocation_id, "--", "python3", "-c", script)


def wait_for(stack: Cloud, invocation_id: str, states: set[str], *, timeout_s: float = 30) -> Any:
    """The invocation once it is in one of these states."""
    ends = time.monotonic() + timeout_s
    while time.monotonic() < ends:
        found = stack.json("fn", "status", invocation_id)
        if found["state"] in states:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{found}\n{stack.logs()}")


@pytest.fixture(scope="module")
def hostile(stack: Cloud) -> Iterator[Cloud]:
    """The cloud with handlers that misbehave, on a SKU with little memory and disk."""
    shape = ("--gpu-model", "*", "--memory", "0.25", "--cpus", "0.5", "--count", "1", "--scratch", "0.1")
    stack.ok("sku", "set", "tiny", "--price", "1", *shape)
    stack.ok("fn", "deploy", str(APPS / "hostile.py"), timeout_s=120)
    yield stack
    stack.ok("fn", "delete", "hostile-misbehave")


@pytest.mark.parametrize(
    ("how", "failure"),
    [
        ("exit", {"retry_exhausted", "handler_error"}),
        ("die", {"retry_exhausted"}),
        ("close", {"retry_exhausted", "framework_error"}),
        ("disk", {"handler_error"}),
        ("memory", {"oom", "handler_error"}),
        ("unserialisable", {"handler_error"}),
        ("nats", {"handler_error"}),
    ],
)
def test_a_handler_that_misbehaves_fails_alone(hostile: Cloud, how: str, failure: set[str]) -> None:
    status, told = call(hostile, "hostile-misbehave", {"how": how}, timeout_s=90)
    assert status >= 400
    assert told["error"]["code"] in failure, told
    assert call(hostile, "hostile-misbehave", {"how": "nothing"})[1] == "fine"


def test_a_handler_that_leaves_processes_or_shouts_is_served(hostile: Cloud) -> None:
    assert call(hostile, "hostile-misbehave", {"how": "fork"})[1] == "forked"
    assert call(hostile, "hostile-misbehave", {"how": "shout"})[1] == "shouted"
    assert call(hostile, "hostile-misbehave", {"how": "nothing"})[1] == "fine"


def test_a_handler_that_hangs_is_stopped_at_its_timeout(hostile: Cloud) -> None:
    status, _ = call(hostile, "hostile-misbehave", {"how": "hang"}, headers={"Penstock-Timeout": "1"})
    assert status in (202, 504)
    newest = hostile.json("fn", "invocations", "hostile-misbehave")["items"][0]
    ended = wait_for(hostile, newest["id"], {"expired"})
    assert ended["failure_class"] == "framework_timeout"
    assert call(hostile, "hostile-misbehave", {"how": "nothing"})[1] == "fine"


def test_an_idle_function_holds_no_gpu(hostile: Cloud) -> None:
    assert call(hostile, "hostile-misbehave", {"how": "nothing"})[1] == "fine"
    ends = time.monotonic() + 60
    while hostile.json("fn", "workers", "hostile-misbehave")["items"] and time.monotonic() < ends:
        time.sleep(0.1)
    assert hostile.json("fn", "workers", "hostile-misbehave")["items"] == []


def test_handlers_read_and_write_the_projects_objects(stack: Cloud, tmp_path: Path) -> None:
    content = os.urandom(12 << 20)
    (tmp_path / "big.bin").write_bytes(content)
    stack.ok("object", "put", str(tmp_path / "big.bin"), "in/big.bin")
    stack.ok("fn", "deploy", str(APPS / "keeping.py"), "--no-wait")
    status, copied = call(stack, "keeping-copy", {"source": "in/big.bin", "target": "out/big.bin"})
    assert (status, copied) == (200, {"sha256": hashlib.sha256(content).hexdigest(), "keys": ["out/big.bin"]})
    stack.ok("object", "get", "out/big.bin", str(tmp_path / "back.bin"))
    assert (tmp_path / "back.bin").read_bytes() == content
    assert call(stack, "keeping-aside", {"key": "out/ä b.txt", "text": "hello"}) == (200, "hello")
    assert call(stack, "keeping-refused", "functions/x") == (200, "permission_denied")
    assert call(stack, "keeping-refused", "/bad//key") == (200, "storage.bad_key")

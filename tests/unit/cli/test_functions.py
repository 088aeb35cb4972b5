"""Functions from the command line: deploying, calling, following."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from penstock.cli import app as tree
from penstock.cli import serving
from penstock.sdk import resolving
from penstock.sdk.packing import pack
from penstock.wire import locks
from scripted_api import Handler, ScriptedApi, error_answer, json_answer

from .answers import page
from .cases import MOMENT, OBJECT, RUNTIME, SKU
from .conftest import Cli
from .functioncases import FUNCTION, INVOCATION, LINE

RESOLUTION = {
    "id": f"rsl_{'0' * 26}",
    "state": "queued",
    "base": "python:3",
    "requirements": "tiny>=1\n",
    "python": "3.11",
    "lock": "",
    "error_code": "",
    "error": "",
    "created_at": MOMENT,
    "finished_at": None,
}
ACK = {
    **dict.fromkeys(("mode", "subject", "resultSubject", "metricsSubject", "stream"), "x"),
    "invocationID": "inv-1",
    "serverlessRequestID": "shop-price",
    "sequence": 1,
    "duplicate": False,
    "acceptedAt": LINE["at"],
}
NAMES = ("shop-price", "shop-till")
SOURCE = """
import penstock

app = penstock.App("shop")


@app.function(sku="g1.1", retries=2)
def price(item):
    return 3


@app.cls(sku="g1.1")
class Till:
    @penstock.method()
    def add(self, amount):
        return amount
"""

TAX = """

@app.function(sku="g1.1")
def tax(item):
    return 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "work" / "shop.py"
    made.parent.mkdir()
    made.write_text(SOURCE)
    return made


def run(cli: Cli, *line: str) -> int:
    return tree.run(tree.app, list(line), cli.environ())


def key(file: Path) -> str:
    return f"functions/shop/{pack(file.parent).sha256}.tar.gz"


def takes(api: ScriptedApi, file: Path, suffix: str = "") -> None:
    """The server takes the code and the functions; new versions serve at the third look."""
    api.on("GET", "/objects", json_answer(page([])))
    api.on("GET", "/skus", json_answer(page([SKU | {"name": "g1.1", "price_microusd_per_gpu_hour": 2_500_000}])))
    api.on("PUT", f"/objects/{key(file)}", json_answer(OBJECT))
    for name in NAMES:
        now, later = FUNCTION | {"name": name + suffix, "serving_version": 2}, FUNCTION | {"name": name + suffix}
        api.on("PUT", f"/functions/{name}{suffix}", json_answer(now))
        api.on("GET", f"/functions/{name}{suffix}", json_answer(now), json_answer(now), json_answer(later))
        api.on("DELETE", f"/functions/{name}{suffix}", json_answer(None, 204))


def sent(api: ScriptedApi, method: str, path: str) -> list[Any]:
    return [seen.body for seen in api.seen if (seen.method, seen.path) == (method, f"/api/v1{path}")]


def test_deploy_stores_the_code_puts_each_function_and_waits(
    api: ScriptedApi, cli: Cli, file: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_POLL_S", 0.01)
    cli.logged_in(api)
    takes(api, file)
    assert run(cli, "fn", "deploy", str(file)) == 0, capfd.readouterr().err
    said = capfd.readouterr()
    assert "deploying shop-price" in said.err
    assert "shop-till version 3 serves" in said.err
    assert said.err.count("shop-till version 3: ") == 1
    assert said.out.count("shop-") == 2
    [price] = map(json.loads, sent(api, "PUT", "/functions/shop-price"))
    assert (price["handler"], price["retries"], price["code"]["object"]) == ("shop:price", 2, key(file))
    [till] = map(json.loads, sent(api, "PUT", "/functions/shop-till"))
    assert till["handler"] == "shop:Till"
    assert sent(api, "PUT", f"/objects/{key(file)}")[0] == pack(file.parent).content
    assert not list(file.parent.glob("**/__pycache__"))


def test_code_that_is_there_is_not_sent_again_and_one_function_may_be_chosen(
    api: ScriptedApi, cli: Cli, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    takes(api, file)
    api.on("GET", "/objects", json_answer(page([OBJECT | {"key": key(file)}])))
    assert run(cli, "fn", "deploy", str(file), "--name", "price", "--no-wait", "-o", "json") == 0
    assert [item["name"] for item in json.loads(capfd.readouterr().out)["items"]] == ["shop-price"]
    assert not [seen for seen in api.seen if seen.method == "PUT" and "/objects/" in seen.path]


def test_deploy_says_what_was_packed_and_what_idle_workers_cost(
    api: ScriptedApi, cli: Cli, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    (file.parent / ".env").write_text("KEY=secret")
    (file.parent / "away").symlink_to("/")
    takes(api, file)
    assert run(cli, "fn", "deploy", str(file), "--no-wait") == 0, capfd.readouterr().err
    said = capfd.readouterr().err
    assert f"packed 1 file, {len(SOURCE)} bytes (" in said
    assert "left out: away is a link that leads out of the folder" in said
    kept = "a worker is kept 300 s after its last call and costs $2.50/h meanwhile; idle_s=… changes it"
    assert f"shop-price: {kept}" in said


def test_packages_by_name_are_resolved_by_the_servers_and_shown(
    api: ScriptedApi, cli: Cli, file: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolving, "_POLL_S", 0.01)
    cli.logged_in(api)
    file.write_text(SOURCE.replace("retries=2", 'requirements=["tiny>=1"]'))
    takes(api, file)
    lock = f"tiny==1.2 --hash=sha256:{'a' * 64}\n"
    api.on("POST", "/resolutions", json_answer(RESOLUTION, 202))
    path = f"/resolutions/{RESOLUTION['id']}"
    api.on("GET", path, json_answer(RESOLUTION), json_answer(RESOLUTION | {"state": "succeeded", "lock": lock}))
    name = f"/runtimes/shop-{locks.digest('python:3', lock)[:12]}"
    api.on("PUT", name, json_answer(RUNTIME | {"name": name.rpartition("/")[2]}))
    assert run(cli, "fn", "deploy", str(file), "--no-wait") == 0, capfd.readouterr().err
    assert "resolved for Python 3.11: tiny==1.2" in capfd.readouterr().err
    [asked] = map(json.loads, sent(api, "POST", "/resolutions"))
    assert (asked["requirements"], asked["upgrade"]) == ("tiny>=1\n", False)
    assert json.loads(sent(api, "PUT", "/functions/shop-price")[0])["runtime"] == name.rpartition("/")[2]
    failed = RESOLUTION | {"state": "failed", "error_code": "unresolvable", "error": "tiny>=1 was not found"}
    api.on("POST", "/resolutions", json_answer(failed, 202))
    assert run(cli, "fn", "deploy", str(file), "--upgrade") != 0
    assert "tiny>=1 was not found (code=unresolvable)" in capfd.readouterr().err


def test_a_file_that_is_ignored_itself_is_not_deployed(
    api: ScriptedApi, cli: Cli, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    (file.parent / ".gitignore").write_text("shop.py\n")
    assert run(cli, "fn", "deploy", str(file)) == 1
    assert "shop.py itself is left out" in capfd.readouterr().err


def test_a_file_may_import_what_only_the_unit_has(
    api: ScriptedApi, cli: Cli, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    block = 'app = penstock.App("shop")\nwith app.imports():\n    import nothing_like_this as nothing\n'
    file.write_text(SOURCE.replace('app = penstock.App("shop")', block))
    takes(api, file)
    assert run(cli, "fn", "deploy", str(file), "--no-wait") == 0, capfd.readouterr().err


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import nothing_like_this\n", "in a block `with app.imports():`"),
        (
            (
                "import penstock\napp = penstock.App('x')\nwith app.imports():\n    import nothing_like_this as np\n"
                "def f(x: np.ndarray): ...\n"
            ),
            "from __future__ import annotations",
        ),
    ],
)
def test_a_failing_import_comes_with_its_remedy(
    api: ScriptedApi, cli: Cli, file: Path, source: str, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    file.write_text(source)
    assert run(cli, "fn", "deploy", str(file)) == 1
    assert says in capfd.readouterr().err


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1\n", "has no function"),
        ("import nothing_like_this\n", "line 1 of shop.py: ModuleNotFoundError"),
        ("def (\n", "SyntaxError"),
        (SOURCE.replace('sku="g1.1", retries=2', 'sku="g1.1", retries=99'), "retries must be 0 to 10"),
        (SOURCE.replace("g1.1", "G 1"), "sku"),
    ],
)
def test_a_file_that_cannot_be_deployed_is_one_line(
    api: ScriptedApi, cli: Cli, file: Path, source: str, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    file.write_text(source)
    takes(api, file)
    for name in NAMES:
        api.on("PUT", f"/functions/{name}", error_answer(400, "invalid_request", "sku: no such offer", "sku"))
    assert run(cli, "fn", "deploy", str(file)) == 1
    assert says in capfd.readouterr().err


def test_a_call_prints_the_result(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cli.logged_in(api)
    api.on("POST", "//f/shop-price", json_answer({"price": 3}, Penstock_Invocation_Id="inv-1"))
    assert run(cli, "fn", "invoke", "shop-price", "-d", '{"item": "tea"}') == 0
    assert json.loads(capfd.readouterr().out) == {"price": 3}
    assert json.loads(api.seen[-1].body) == {"item": "tea"}
    (tmp_path / "in.json").write_text("[1]")
    assert run(cli, "fn", "invoke", "shop-price", "--payload", f"@{tmp_path / 'in.json'}") == 0
    assert json.loads(api.seen[-1].body) == [1]


def test_a_failed_call_shows_the_handlers_traceback(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    failed = {"state": "failed", "error": "no", "error_type": "ValueError", "traceback": "Traceback\n  in price\n"}
    api.on("POST", "//f/shop-price", error_answer(500, "handler_error", "no", Penstock_Invocation_Id="inv-1"))
    api.on("GET", "/invocations/inv-1", json_answer(INVOCATION | failed))
    assert run(cli, "fn", "invoke", "shop-price") == 6
    error = capfd.readouterr().err
    assert "  in price" in error
    assert "inv-1 failed: ValueError: no (code=failed)" in error


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_a_failed_call_is_one_json_document_with_its_traceback(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str], stream: list[str]
) -> None:
    cli.logged_in(api)
    failed = INVOCATION | {
        "state": "failed",
        "failure_class": "handler_error",
        "error": "no\nreally",
        "error_type": "ValueError",
        "traceback": "Traceback\n  in price\n",
    }
    api.on("POST", "//f/shop-price", error_answer(500, "handler_error", "no", Penstock_Invocation_Id="inv-1"))
    api.on("POST", "/serverless/invocations", json_answer({"data": ACK}, 202))
    api.on("GET", "/invocations/inv-1/events", events(("end", failed)))
    api.on("GET", "/invocations/inv-1", json_answer(failed))
    assert run(cli, "fn", "invoke", "shop-price", "-o", "json", *stream) == 6
    said = capfd.readouterr()
    fields = ("id", "state", "failure_class", "error_type", "error", "traceback")
    assert json.loads(said.out) == {name: failed[name] for name in fields} | {"id": INVOCATION["id"]}
    assert json.loads(said.err)["error"]["code"] == "failed"


@pytest.mark.parametrize("payload", ["{", "@/no/such/file", "nan!"])
def test_a_payload_that_is_no_json_is_not_sent(api: ScriptedApi, cli: Cli, payload: str) -> None:
    cli.logged_in(api)
    cli.fails(1, "fn", "invoke", "shop-price", "-d", payload, says="payload")
    assert not api.seen


def events(*parts: tuple[str, dict[str, Any]]) -> Handler:
    async def handle(_: web.Request) -> web.Response:
        text = "".join(
            f"id: 1.{at}\nevent: {name}\ndata: {json.dumps(data)}\n\n" for at, (name, data) in enumerate(parts)
        )
        return web.Response(text=text, content_type="text/event-stream")

    return handle


def test_async_and_stream(api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    cli.logged_in(api)
    api.on("POST", "/serverless/invocations", json_answer({"data": ACK}, 202))
    assert run(cli, "fn", "invoke", "shop-price", "--async") == 0
    assert capfd.readouterr().out == "inv-1\n"
    chunk = LINE | {"kind": "chunk", "text": '"piece"'}
    api.on("GET", "/invocations/inv-1/events", events(("output", LINE), ("output", chunk), ("end", INVOCATION)))
    assert run(cli, "fn", "invoke", "shop-price", "--stream") == 0
    said = capfd.readouterr()
    assert said.out == "piece\n"
    assert said.err.startswith("stdout: hello \\x1b[31m")


def test_a_stream_of_a_handler_that_yields_nothing_ends_with_its_result(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    api.on("POST", "/serverless/invocations", json_answer({"data": ACK}, 202))
    api.on("GET", "/invocations/inv-1/events", events(("output", LINE), ("end", INVOCATION)))
    api.on("GET", "/invocations/inv-1", json_answer(INVOCATION | {"result": None, "body": 3}))
    api.on("GET", "/invocations/inv-1/result", json_answer(3))
    assert run(cli, "fn", "invoke", "shop-price", "--stream") == 0
    assert capfd.readouterr().out == "3\n"


def test_logs_are_the_last_lines_in_their_order(api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    cli.logged_in(api)
    lines = [LINE | {"place": place, "text": f"line {place}"} for place in (9, 8)]
    api.on("GET", "/functions/shop-price/logs", json_answer(page(lines)))
    assert run(cli, "fn", "logs", "shop-price", "--limit", "2") == 0
    assert [line.rpartition(" ")[2] for line in capfd.readouterr().out.splitlines()] == ["8", "9"]
    assert api.seen[0].query["order"] == "desc"


def test_an_error_of_many_lines_is_shown_on_many_lines(
    api: ScriptedApi, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    cli.logged_in(api)
    error = 'it does not start: RuntimeError\n  File "shop.py", line 3'
    api.on("GET", "/invocations/inv-1", json_answer(INVOCATION | {"state": "failed", "error": error}))
    assert run(cli, "fn", "status", "inv-1") == 0
    assert 'RuntimeError\n                 File "shop.py", line 3\n' in capfd.readouterr().out


def test_a_result_is_written_byte_for_byte(
    api: ScriptedApi, cli: Cli, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    cli.logged_in(api)

    async def handle(_: web.Request) -> web.Response:
        return web.Response(body=b"\x00\xff")

    api.on("GET", "/invocations/inv-1", json_answer(INVOCATION | {"content_type": "image/png"}))
    api.on("GET", "/invocations/inv-1/result", handle)
    assert run(cli, "fn", "result", "inv-1") == 0
    assert capfdbinary.readouterr().out == b"\x00\xff"
    out = tmp_path / "out.bin"
    assert run(cli, "fn", "result", "inv-1", "--out", str(out)) == 0
    assert out.read_bytes() == b"\x00\xff"
    assert run(cli, "fn", "result", "inv-1", "--out", str(out)) == 5


@pytest.mark.parametrize(
    ("content_type", "content", "shown", "as_json"),
    [
        ("application/json", b'"two\\nlines"', b"two\nlines\n", "two\nlines"),
        ("application/json", b'{"a": [1]}', None, {"a": [1]}),
        ("application/json", b"3", b"3\n", 3),
        ("application/json", b"null", b"null\n", None),
        ("text/plain", b"hello", b"hello\n", "hello"),
        ("image/png", b"\x00\xff", b"\x00\xff", {"content_type": "image/png", "encoding": "base64", "body": "AP8="}),
    ],
)
@pytest.mark.parametrize("line", [["fn", "result", "inv-1"], ["fn", "invoke", "shop-price"]])
def test_a_result_is_printed_as_what_it_is(
    api: ScriptedApi,
    cli: Cli,
    capfdbinary: pytest.CaptureFixture[bytes],
    line: list[str],
    content_type: str,
    content: bytes,
    shown: bytes | None,
    as_json: Any,
) -> None:
    async def handle(_: web.Request) -> web.Response:
        headers = {"Content-Type": content_type, "Penstock-Invocation-Id": "inv-1"}
        return web.Response(body=content, headers=headers)

    cli.logged_in(api)
    api.on("GET", "/invocations/inv-1", json_answer(INVOCATION | {"content_type": content_type}))
    api.on("GET", "/invocations/inv-1/result", handle)
    api.on("POST", "//f/shop-price", handle)
    assert run(cli, *line) == 0
    printed = capfdbinary.readouterr().out
    assert json.loads(printed) == as_json if shown is None else printed == shown
    assert run(cli, *line, "-o", "json") == 0
    assert json.loads(capfdbinary.readouterr().out) == as_json


def test_serve_deploys_again_on_a_change_and_deletes_at_the_end(api: ScriptedApi, cli: Cli, file: Path) -> None:
    cli.logged_in(api)
    takes(api, file, "-dev")
    log = cli.home / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            cli.command("fn", "serve", str(file)), env=cli.environ(), stdout=output, stderr=output
        )
    try:
        wait_for(api, "PUT", "/functions/shop-till-dev", 1, log)
        changed = cli.home / "changed" / "shop.py"
        changed.parent.mkdir()
        changed.write_text(SOURCE.replace("retries=2", "retries=3") + TAX)
        api.on("PUT", f"/objects/{key(changed)}", json_answer(OBJECT))
        api.on("PUT", "/functions/shop-tax-dev", json_answer(FUNCTION | {"name": "shop-tax-dev"}))
        api.on("DELETE", "/functions/shop-tax-dev", json_answer(None, 204))
        # At once, for it is looked at all the time.
        changed.replace(file)
        wait_for(api, "GET", "/functions/shop-tax-dev/logs", 1, log)
        file.write_text("broken(\n")
        until = time.monotonic() + 30
        while "not deployed" not in log.read_text():
            assert time.monotonic() < until
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert all(sent(api, "DELETE", f"/functions/{name}-dev") for name in (*NAMES, "shop-tax"))
    assert json.loads(sent(api, "PUT", "/functions/shop-price-dev")[-1])["retries"] == 3


def test_serve_leaves_nothing_behind_when_its_terminal_is_closed(api: ScriptedApi, cli: Cli, file: Path) -> None:
    cli.logged_in(api)
    takes(api, file, "-dev")
    log = cli.home / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            cli.command("fn", "serve", str(file)), env=cli.environ(), stdout=output, stderr=output
        )
    try:
        wait_for(api, "GET", "/functions/shop-till-dev/logs", 1, log)
        os.kill(process.pid, signal.SIGHUP)
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert all(sent(api, "DELETE", f"/functions/{name}-dev") for name in NAMES)


def wait_for(api: ScriptedApi, method: str, path: str, count: int, log: Path) -> None:
    until = time.monotonic() + 30
    while len(sent(api, method, path)) < count:
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.02)

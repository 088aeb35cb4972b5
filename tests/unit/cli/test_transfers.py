"""Secrets and objects on the command line: what is read, what is sent, what is written, and what is never shown."""

import base64
import hashlib
import json
import os
from pathlib import Path

import pytest
from aiohttp import web

from scripted_api import Handler, ScriptedApi, error_answer, json_answer

from .cases import OBJECT, SECRET
from .conftest import Cli

CANARY = "canary-0815"


@pytest.fixture(autouse=True)
def logged_in(api: ScriptedApi, cli: Cli) -> None:
    cli.logged_in(api)


def content(body: bytes, **headers: str) -> Handler:
    async def handle(_: web.Request) -> web.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(body=body, content_type="text/plain", headers=named)

    return handle


def test_a_secret_is_taken_from_a_file_or_standard_input_and_not_shown(
    api: ScriptedApi, cli: Cli, tmp_path: Path
) -> None:
    api.on("PUT", "/secrets/token", json_answer(SECRET))
    (tmp_path / "value").write_text(CANARY)
    runs = [
        cli.run("secret", "set", "token", "--from-file", str(tmp_path / "value")),
        cli.run("secret", "set", "token", "--from-stdin", stdin=CANARY, env={"PENSTOCK_DEBUG": "1"}),
    ]
    for done, seen in zip(runs, api.seen, strict=True):
        assert done.returncode == 0, done.stderr
        assert CANARY not in done.stdout + done.stderr
        assert json.loads(seen.body) == {"value": None, "value_base64": base64.b64encode(CANARY.encode()).decode()}
        assert seen.headers["idempotency-key"]


@pytest.mark.parametrize(
    ("options", "stdin", "says"),
    [
        ([], "", "--from-file or --from-stdin"),
        (["--no-input"], "", "--no-input was given"),
        (["--from-stdin"], "", "1 to 65536 bytes"),
        (["--from-stdin"], "x" * 65537, "1 to 65536 bytes"),
        (["--from-stdin", "--from-file", "x"], "", "not both"),
        (["--from-file", "/nonexistent/file"], "", "cannot read"),
        (["a-value-as-an-argument"], "", "unexpected extra argument"),
    ],
)
def test_a_secret_without_a_value_is_not_sent(
    api: ScriptedApi, cli: Cli, options: list[str], stdin: str, says: str
) -> None:
    cli.fails(1, "secret", "set", "token", *options, says=says, stdin=stdin)
    assert api.seen == []


@pytest.mark.parametrize("given", ["=X", "token=", "token"])
def test_a_bad_use_of_a_secret_is_refused(api: ScriptedApi, cli: Cli, given: str) -> None:
    more = ["--secret", "token"] if given == "token" else []
    cli.fails(1, "alloc", "create", "--sku", "g1.1", "--secret", given, *more, says="--secret")
    assert api.seen == []


def test_a_file_is_sent_as_it_is(api: ScriptedApi, cli: Cli, tmp_path: Path) -> None:
    api.on("PUT", "/objects/models/a b.txt", json_answer(OBJECT))
    sent = os.urandom(700_000)
    (tmp_path / "file").write_bytes(sent)
    done = cli.run("object", "put", str(tmp_path / "file"), "models/a b.txt", "--only-new", "-o", "json")
    assert done.returncode == 0, done.stderr
    [seen] = api.seen
    assert seen.body == sent
    assert seen.headers["content-length"] == "700000"
    assert (seen.headers["content-type"], seen.headers["if-none-match"]) == ("text/plain", "*")
    assert (json.loads(done.stdout), done.stderr) == (OBJECT, "")


def test_standard_input_is_sent_in_chunks(api: ScriptedApi, cli: Cli) -> None:
    api.on("PUT", "/objects/k", json_answer(OBJECT))
    assert cli.run("object", "put", "-", "k", stdin="abc" * 200_000).returncode == 0
    assert api.seen[0].body == b"abc" * 200_000
    assert api.seen[0].headers["transfer-encoding"] == "chunked"


def test_an_object_is_written_whole_or_not_at_all(api: ScriptedApi, cli: Cli, tmp_path: Path) -> None:
    body = os.urandom(700_000)
    api.on("GET", "/objects/m/x.bin", content(body, Content_SHA256=hashlib.sha256(body).hexdigest()))
    target = tmp_path / "out.bin"
    assert cli.run("object", "get", "m/x.bin", str(target)).returncode == 0
    assert target.read_bytes() == body
    cli.fails(5, "object", "get", "m/x.bin", str(target), says="is there already")
    api.on("GET", "/objects/m/x.bin", content(b"other", Content_SHA256=hashlib.sha256(body).hexdigest()))
    cli.fails(2, "object", "get", "m/x.bin", str(target), "--force", says="SHA-256 is another")
    assert target.read_bytes() == body
    assert list(tmp_path.glob("*.part")) + list(tmp_path.glob(".*.part")) == []


def test_an_object_goes_to_standard_output(api: ScriptedApi, cli: Cli) -> None:
    api.on("GET", "/objects/k", content(b"line\n"))
    done = cli.run("object", "get", "k", "-")
    assert (done.stdout, done.stderr) == ("line\n", "")


def test_failures_name_what_is_wrong(api: ScriptedApi, cli: Cli, tmp_path: Path) -> None:
    api.on("PUT", "/objects/k", error_answer(413, "storage.too_large", "an object has at most 5 bytes"))
    (tmp_path / "f").write_bytes(b"x")
    cli.fails(1, "object", "put", str(tmp_path / "f"), "k", says="at most 5 bytes")
    cli.fails(1, "object", "put", str(tmp_path), "k", says="is a folder")
    cli.fails(1, "object", "put", str(tmp_path / "absent"), "k", says="cannot read")
    cli.fails(1, "object", "put", str(tmp_path / "f"), "../k", says="segments")
    cli.fails(4, "object", "get", "absent", "-", says="no object")
    cli.fails(1, "object", "get", "k", str(tmp_path / "no" / "folder"), says="cannot write")

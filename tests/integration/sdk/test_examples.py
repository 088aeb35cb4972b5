"""The examples, which are the guide's: each runs in a framework, and the guide shows them as they are."""

import base64
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .framework import Framework, running

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "functions"


def test_every_program_of_the_guide_is_an_example() -> None:
    guide = (ROOT / "docs" / "guides" / "functions.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    sources = [file.read_text() for file in EXAMPLES.glob("*.py")]
    assert len(programs) >= 4
    for program in programs:
        assert any(program.strip() in source for source in sources), program


def test_hello(tmp_path: Path) -> None:
    with running(tmp_path, "hello:greet", code=EXAMPLES) as framework:
        said = framework.invoke({"name": "Ada"})
        assert (said.body, said.of("stdout")) == ("hello, Ada", ["greeting Ada"])
        assert framework.invoke(None).body == "hello, world"


def test_words(tmp_path: Path) -> None:
    with running(tmp_path, "words:Model", code=EXAMPLES) as framework:
        assert framework.call("number", "two").body == 2
        spelt = framework.call("spell", "abc", mode="stream")
        assert spelt.of("chunk") == ["a", "b", "c"]
        assert spelt.of("progress")[-1] == {"done": 3, "total": 3, "message": "letter c"}


def test_a_function_that_calls_another(tmp_path: Path) -> None:
    with running(tmp_path, "words:total", code=EXAMPLES) as framework, framework.connect() as wire:
        wire.invoke({"words": ["one", "three"]})
        wire.head()
        numbers = {"one": 1, "three": 3}
        for frame in wire.frames():
            if "reply" in frame:
                assert frame["reply"]["body"] == 4
                return
            call = frame["call"]
            assert (call["function"], call["payload"]["method"]) == ("words-model", "number")
            answer: dict[str, Any] = {"call": call["call"], "invocationID": "inv-2", "state": "succeeded"}
            framework.request("POST", "/answer", answer | {"body": numbers[call["payload"]["args"][0]]})
    pytest.fail("no reply")


def test_a_function_that_reads_and_writes_objects(tmp_path: Path) -> None:
    content, written = b"one\ntwo\nthree", b""
    entry = {"key": "in.txt", "size": len(content), "sha256": "0" * 64, "contentType": "text/plain"}
    with running(tmp_path, "reports:count", code=EXAMPLES) as framework, framework.connect() as wire:
        wire.invoke({"source": "in.txt", "target": "out.txt"})
        wire.head()
        for frame in wire.frames():
            if "reply" in frame:
                assert (frame["reply"]["body"], written) == (3, b"3")
                return
            asked = frame["object"]
            answer = {"call": asked["call"], "entry": entry}
            if asked["op"] == "read":
                part = content[asked.get("offset", 0) :][: asked.get("length", 0)]
                answer["data"] = base64.b64encode(part).decode()
            else:
                assert (asked["op"], asked["key"], asked["last"]) == ("write", "out.txt", True)
                written += base64.b64decode(asked["data"])
            framework.request("POST", "/answer", answer)
    pytest.fail("no reply")


def test_an_object_that_is_not_there_is_a_typed_failure(tmp_path: Path) -> None:
    with running(tmp_path, "reports:count", code=EXAMPLES) as framework, framework.connect() as wire:
        wire.invoke({"source": "in.txt", "target": "out.txt"})
        wire.head()
        for frame in wire.frames():
            if "reply" in frame:
                assert frame["reply"]["errorType"] == "ObjectNotFound"
                return
            answer = {"call": frame["object"]["call"], "code": "not_found", "error": "no object with this key"}
            framework.request("POST", "/answer", answer)
    pytest.fail("no reply")


def test_another_language_needs_two_paths(tmp_path: Path) -> None:
    path = tmp_path / "framework.sock"
    process = subprocess.Popen(
        [sys.executable, "-S", str(EXAMPLES / "other_language.py")],
        env={"SERVERLESS_FRAMEWORK_SOCKET_PATH": str(path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    unit = Framework(process, path)
    try:
        assert unit.request("GET", "/healthz")[0] == 200
        assert unit.mode() == 0o660
        assert unit.invoke("shout").body == "SHOUT"
        assert unit.invoke(1).reply["statusCode"] == 400
    finally:
        process.kill()
        unit.output()

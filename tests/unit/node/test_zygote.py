"""Which command lines a running interpreter can still become."""

import sys

import pytest

from penstock.node.inside import join
from penstock.node.zygote import Invocation, interpreter, parse, steered


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-c", "x", "a", "-u"], Invocation(kind="c", target="x", arguments=("a", "-u"))),
        (["-cx"], Invocation(kind="c", target="x", arguments=())),
        (["-uc", "x"], Invocation(kind="c", target="x", arguments=(), unbuffered=True)),
        (["-m", "mod", "-c"], Invocation(kind="m", target="mod", arguments=("-c",))),
        (
            ["-u", "-B", "s.py", "-m", "x"],
            Invocation(kind="", target="s.py", arguments=("-m", "x"), unbuffered=True, no_bytecode=True),
        ),
        (["-I", "s.py"], Invocation(kind="", target="s.py", arguments=(), safe_path=True)),
        (
            ["-IBu", "-mhttp.server", "80"],
            Invocation(
                kind="m", target="http.server", arguments=("80",), safe_path=True, unbuffered=True, no_bytecode=True
            ),
        ),
        (["-s", "-E", "s.py"], Invocation(kind="", target="s.py", arguments=())),
    ],
)
def test_what_only_says_what_to_run_is_taken(arguments: list[str], expected: Invocation) -> None:
    assert parse(arguments) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["-"],
        ["--", "s.py"],
        ["--version"],
        ["-V"],
        ["-c"],
        ["-m"],
        ["-i", "s.py"],
        ["-O", "s.py"],
        ["-S", "s.py"],
        ["-X", "dev", "s.py"],
        ["-Xdev", "-c", "x"],
        ["-W", "error", "s.py"],
        ["-uX", "utf8", "s.py"],
        ["-q"],
    ],
)
def test_what_steers_the_start_of_an_interpreter_is_left_to_a_new_one(arguments: list[str]) -> None:
    assert parse(arguments) is None


def test_variables_that_come_too_late_are_seen() -> None:
    own = {"HOME": "/home/unit", "LANG": "C.UTF-8", "PATH": "/bin"}
    assert not steered(own | {"TOKEN": "x", "PATH": "/other", "PYTHONUNBUFFERED": "1", "TZ": "UTC"}, own)
    for name in ("PYTHONPATH", "PYTHONHASHSEED", "LC_ALL", "MALLOC_ARENA_MAX", "OPENSSL_CONF"):
        assert steered(own | {name: "x"}, own)
    assert steered(own | {"LANG": "C"}, own)
    assert steered({"PATH": "/bin"}, own)


def test_another_interpreter_or_program_is_not_this_one() -> None:
    here = sys.executable.rpartition("/")[0]
    assert interpreter(sys.executable, {}) == sys.executable
    assert interpreter("python3", {"PATH": here}) == f"{here}/python3"
    for name in ("python2", "sh", "/bin/sh", "./python3", f"{here}/pip", "/nowhere/python3"):
        assert interpreter(name, {"PATH": f"{here}:/bin"}) is None
    assert interpreter("python3", {"PATH": "/nowhere"}) is None


def test_init_is_joined_without_imports_of_ours() -> None:
    made = join("init")
    compile(made, "init", "exec")
    assert "from penstock" not in made
    assert "import penstock" not in made

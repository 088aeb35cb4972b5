"""The framework as the sidecar meets it: a process, a Unix socket, HTTP."""

import base64
import json
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.sdk import tenant
from penstock.sdk.framework.handler import Handler
from penstock.sdk.functions import values

from .framework import DEADLINE_S, TENANTS, Framework, Wire, install, running


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Framework]:
    with running(tmp_path_factory.mktemp("kitchen"), "kitchen:Kitchen") as framework:
        yield framework


@pytest.fixture
def dishes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The tenant's module, as a caller has it."""
    monkeypatch.syspath_prepend(str(TENANTS))
    import kitchen

    yield kitchen
    sys.modules.pop("kitchen")


def test_it_listens_with_mode_0660_and_is_well(kitchen: Framework) -> None:
    assert kitchen.request("GET", "/healthz") == (200, {"status": "ok"})
    assert kitchen.mode() == 0o660


def test_hooks_ran_once_and_the_instance_stays(kitchen: Framework) -> None:
    first, second = kitchen.call("state").body, kitchen.call("state").body
    assert second[0] == first[0] + 1
    assert first[1] == second[1] == ["heat", "simmer"]


@pytest.mark.parametrize("value", [None, 0, 1.5, True, "ä\u2028\0", [], {}, {"a": [1, {"b": None}]}, -(1 << 62)])
def test_json_comes_back_as_it_went(kitchen: Framework, value: Any) -> None:
    said = kitchen.call("echo", value)
    assert (said.frames, said.reply) == ([], {"body": value})


def test_pickles_come_back_as_they_went(kitchen: Framework, dishes: Any) -> None:
    for value in ((1, 2), {1: "a"}, float("inf"), b"x", {"s"}, 1 << 80, dishes.Dish("soup")):
        payload = values.encode_call((value,), {}, "echo")
        assert payload.content_type == values.PICKLE
        said = kitchen.invoke(json.loads(payload.text), contentType=payload.content_type)
        assert said.reply["contentType"] == values.PICKLE
        assert values.decode_result(values.PICKLE, said.body, said.reply["encoding"]) == value


def test_classes_of_the_callers_main_program_are_found(kitchen: Framework, dishes: Any) -> None:
    pickled = pickle.dumps(((dishes.Dish("pie"),), {}, "echo"), protocol=0).replace(b"ckitchen\n", b"c__main__\n")
    assert b"__main__" in pickled
    said = kitchen.invoke(base64.b64encode(pickled).decode(), contentType=values.PICKLE)
    assert values.decode_result(values.PICKLE, said.body) == dishes.Dish("pie")


def test_what_a_handler_prints_comes_with_its_invocation(kitchen: Framework) -> None:
    said = kitchen.call("talk", "ada")
    assert said.of("stdout") == ["hello ada", "raw", "no end"]
    assert said.of("stderr") == ["to stderr", "careful with ada"]
    assert said.body == "ada"


def test_two_at_once_hear_each_its_own(kitchen: Framework) -> None:
    with kitchen.connect() as one, kitchen.connect() as two:
        for wire, name in ((one, "a"), (two, "b")):
            call = {"args": [name, "t"], "kwargs": {}, "method": "together"}
            wire.invoke(call, invocationID=f"inv-{name}")
        heard = [wire.said().of("stdout") for wire in (one, two)]
    assert heard == [["with a"], ["with b"]]


def test_async_handlers_overlap_on_the_loop(kitchen: Framework) -> None:
    with kitchen.connect() as slow, kitchen.connect() as quick:
        slow.invoke({"args": ["stew", 0.3], "kwargs": {}, "method": "cook"}, invocationID="slow")
        quick.invoke({"args": ["egg"], "kwargs": {}, "method": "cook"}, invocationID="quick")
        assert quick.said().of("stdout") == ["cooking egg", "done egg"]
        said = slow.said()
    assert said.of("stdout") == ["cooking stew", "done stew"]
    assert said.body == {"dish": "stew"}


def test_a_bare_thread_speaks_for_the_only_invocation(kitchen: Framework) -> None:
    assert kitchen.call("in_a_thread", "from a thread").of("stdout") == ["from a thread"]


def test_progress_that_json_cannot_hold_fails_nothing(kitchen: Framework) -> None:
    said = kitchen.call("report_oddly")
    assert said.body == "told"
    assert "nan" in said.of("progress")[0]


def test_what_is_printed_after_the_end_goes_to_the_units_log(tmp_path: Path) -> None:
    with running(tmp_path, "kitchen:Kitchen") as framework:
        framework.call("speak_later", "after the end")
        time.sleep(0.5)
        framework.process.send_signal(signal.SIGTERM)
        assert "after the end" in framework.output()


def test_progress_and_the_invocation_are_known(kitchen: Framework) -> None:
    said = kitchen.call("report", invocationID="inv-7", attempt=3)
    assert said.of("progress") == [{"done": 1, "total": 4, "message": "chopping"}]
    assert said.body == ["inv-7", 3, "sync", 30.0]


@pytest.mark.parametrize(("method", "returned"), [("count_to", "all"), ("count_slowly", None)])
def test_generators_stream(kitchen: Framework, method: str, returned: str | None) -> None:
    followed = kitchen.call(method, 3, mode="stream")
    assert followed.of("chunk") == [0, 1, 2]
    assert followed.body == returned
    assert kitchen.call(method, 3).body == [0, 1, 2]


def test_an_exception_is_told_with_the_tenants_frames_alone(kitchen: Framework, dishes: Any) -> None:
    reply = kitchen.call("spoil", "milk").reply
    assert (reply["statusCode"], reply["error"], reply["errorType"]) == (500, "milk", "Spoilt")
    assert "in spoil" in reply["traceback"]
    assert "KeyError: 'missing'" in reply["traceback"]
    assert "penstock/sdk" not in reply["traceback"]
    original = values.decode_exception(reply["body"]["exception"])
    assert isinstance(original, dishes.Spoilt)
    assert original.args == ("milk",)


def test_a_plain_caller_gets_no_pickle(kitchen: Framework) -> None:
    def plain(method: str, *args: Any) -> Any:
        return kitchen.invoke({"args": list(args), "kwargs": {}, "method": method}).reply

    assert "body" not in plain("spoil", "milk")
    assert plain("spoil_later")["errorType"] == "ValueError"
    refused = plain("dish", "soup")
    assert refused["statusCode"] == 500
    assert "of type Dish, is not JSON" in refused["error"]
    assert base64.b64decode(plain("picture")["body"]) == b"\x89PNG\x00"
    assert plain("picture")["contentType"] == "application/octet-stream"


@pytest.mark.parametrize(("method", "says"), [("", "names no method"), ("fly", "no method 'fly'"), ("heat", "heat")])
def test_a_call_must_name_a_method(kitchen: Framework, method: str, says: str) -> None:
    reply = kitchen.call(method).reply
    assert reply["statusCode"] == 400
    assert says in reply["error"]
    assert "count_to" in reply["error"]
    plain = kitchen.invoke({"method": method}).reply if method else reply
    assert says in plain["error"]


@pytest.mark.parametrize(
    ("deployed", "meant"), [("kitchen-kitchen-dev", "-dev"), ("kitchen-kitchen", ""), ("x-dev", "")]
)
async def test_what_is_served_for_development_calls_its_like(dishes: Any, deployed: str, meant: str) -> None:
    await Handler().load("kitchen:Kitchen", deployed)
    assert dishes.Kitchen.name == f"kitchen-kitchen{meant}"


def test_what_a_worker_prints_while_it_starts_is_told_by_its_first_invocation(tmp_path: Path) -> None:
    with running(tmp_path, "chatty:greet") as framework:
        first, second = framework.invoke(None), framework.invoke(None)
    assert (first.of("stdout"), first.of("stderr")) == (["reading weights", "hello"], ["slowly"])
    assert (second.of("stdout"), second.of("stderr")) == (["hello"], [])


def test_a_number_that_python_refuses_is_no_mystery(kitchen: Framework) -> None:
    with kitchen.connect() as wire:
        wire.send("POST", "/invoke", b'{"invocationID":"inv-1","payload":' + b"9" * 5000 + b"}")
        status, told = wire.receive()
    assert (status, "too long a number" in told["error"]) == (400, True)


def answered(wire: Wire, framework: Framework, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Play the sidecar for an invocation that calls others; its reply."""
    status, _ = wire.head()
    assert status == 200
    for frame in wire.frames():
        if "reply" in frame:
            return frame["reply"]
        if "call" in frame:
            call = frame["call"]
            done = {"call": call["call"], "invocationID": "inv-child", "state": "succeeded", **answer(call)}
            assert framework.request("POST", "/answer", done)[0] == 200
    raise AssertionError("no reply")


@pytest.mark.parametrize(
    ("method", "argument", "result"),
    [
        ("order", "salt", ["got", "pantry-fetch:salt"]),
        ("order_async", "salt", ["pantry-fetch:salt", "pantry-fetch:salt2"]),
        ("order_many", ["a"] * 40, ["pantry-fetch:a"] * 40),
        ("order_later", "salt", "inv-child"),
    ],
)
def test_handlers_call_other_functions(kitchen: Framework, method: str, argument: Any, result: Any) -> None:
    with kitchen.connect() as wire:
        wire.invoke({"args": [argument], "kwargs": {}, "method": method})
        reply = answered(
            wire, kitchen, lambda call: {"body": f"{call['function']}:{call['payload']['args'][0]}", "statusCode": 200}
        )
    assert reply["body"] == result


def test_a_failed_call_raises_what_the_other_raised(kitchen: Framework) -> None:
    failed = {
        "state": "failed",
        "error": "none left",
        "errorType": "LookupError",
        "traceback": "Traceback: over there\n",
        "body": {"exception": values.encode_exception(LookupError("none left"))},
    }
    with kitchen.connect() as wire:
        wire.invoke({"args": ["salt"], "kwargs": {}, "method": "order"})
        reply = answered(wire, kitchen, lambda _: failed)
    assert reply["errorType"] == "LookupError"
    assert "over there" in reply["traceback"]


def test_a_call_that_would_block_the_loop_is_refused(kitchen: Framework) -> None:
    assert "remote.aio" in kitchen.call("order_wrongly", "x").reply["error"]


@pytest.mark.parametrize("method", ["loop_for_ever", "wait_for_ever", "order"])
def test_a_cancelled_invocation_ends_and_the_process_goes_on(kitchen: Framework, method: str) -> None:
    with kitchen.connect() as wire:
        args = ["salt"] if method == "order" else []
        wire.invoke({"args": args, "kwargs": {}, "method": method}, invocationID=f"inv-{method}", attempt=2)
        wire.head()
        frames = wire.frames()
        assert next(frames).keys() <= {"stdout", "call"}
        assert kitchen.request("POST", "/cancel", {"invocationID": f"inv-{method}", "attempt": 1})[0] == 404
        assert kitchen.request("POST", "/cancel", {"invocationID": f"inv-{method}", "attempt": 2})[0] == 200
        *_, last = frames
    assert last["reply"]["statusCode"] == 499
    assert kitchen.call("echo", 1).body == 1


def test_a_connection_that_is_closed_cancels(kitchen: Framework) -> None:
    with kitchen.connect() as wire:
        wire.invoke({"args": [], "kwargs": {}, "method": "loop_for_ever"}, invocationID="inv-left")
        wire.head()
    until = time.monotonic() + DEADLINE_S
    while kitchen.request("POST", "/cancel", {"invocationID": "inv-left"})[0] == 200:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_slow_reader_holds_the_handler_back_and_loses_nothing(kitchen: Framework) -> None:
    with kitchen.connect() as wire:
        wire.invoke({"args": [20_000], "kwargs": {}, "method": "shout"})
        time.sleep(0.2)
        said = wire.said()
    assert said.body == 20_000
    assert [line.split()[1] for line in said.of("stdout")] == [str(number) for number in range(20_000)]


def test_a_forked_child_gives_no_second_answer(kitchen: Framework) -> None:
    said = kitchen.call("fork")
    assert (said.frames, said.body) == ([], 0)


def test_connections_are_kept_and_requests_may_come_ahead(kitchen: Framework) -> None:
    with kitchen.connect() as wire:
        for number in range(3):
            wire.invoke({"args": [number], "kwargs": {}, "method": "echo"})
        assert [wire.said().body for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"rubbish\r\n\r\n", 400),
        (b"GET /healthz HTTP/2\r\n\r\n", 400),
        (b"POST /invoke HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400),
        (b"POST /invoke HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /invoke HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"POST /invoke HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 40_000, 431),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 40_000 + b"\r\n\r\n", 431),
    ],
)
def test_rubbish_is_refused_and_the_connection_closed(kitchen: Framework, data: bytes, status: int) -> None:
    with kitchen.connect() as wire:
        wire.raw(data)
        assert wire.receive()[0] == status
        assert wire.closed()
    assert kitchen.request("GET", "/healthz")[0] == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"attempt": "x"}', b"[" * 100_000])
def test_bodies_that_are_no_invocation_are_refused(kitchen: Framework, body: bytes) -> None:
    with kitchen.connect() as wire:
        wire.send("POST", "/invoke", body)
        assert wire.receive()[0] == 400


def test_unknown_paths_and_answers_are_not_found(kitchen: Framework) -> None:
    assert kitchen.request("GET", "/nothing")[0] == 404
    assert kitchen.request("GET", "/invoke")[0] == 404
    assert kitchen.request("POST", "/answer", {"call": "x"})[0] == 404
    assert kitchen.request("POST", "/answer", [])[0] == 404


def test_without_a_handler_it_answers_with_what_it_was_given(tmp_path: Path) -> None:
    with running(tmp_path) as framework:
        for payload in (None, {"args": [1], "kwargs": {}}, [1], {}):
            assert framework.invoke(payload).body == payload


def test_plain_payloads_become_arguments(tmp_path: Path) -> None:
    with running(tmp_path, "kitchen:add") as framework:
        assert framework.invoke({"a": 1}).body == 3
        assert framework.invoke({"a": 1, "b": 5}).body == 6
        assert framework.invoke(40).body == 42
        wrong = framework.invoke({"c": 1}).reply
        assert (wrong["statusCode"], wrong["errorType"]) == (500, "TypeError")


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        ("broken:run", "ModuleNotFoundError: No module named 'no_such_package_anywhere'"),
        ("kitchen:missing", "AttributeError"),
        ("kitchen:entered", "which cannot be called"),
    ],
)
def test_a_handler_that_cannot_be_loaded_is_told_by_health(tmp_path: Path, handler: str, says: str) -> None:
    with running(tmp_path, handler) as framework:
        status, body = framework.request("GET", "/healthz")
        assert status == 500
        assert says in body["error"]
        assert "penstock/sdk" not in body["traceback"]
        assert framework.request("POST", "/invoke", {})[0] == 503


@pytest.mark.parametrize(("how", "status"), [("exit", 3), ("interrupt", 130), ("closed", 3)])
def test_a_handler_that_ends_the_process_ends_it(tmp_path: Path, how: str, status: int) -> None:
    with running(tmp_path, "kitchen:leave") as framework, framework.connect() as wire:
        wire.invoke(how)
        assert wire.closed()
        assert framework.process.wait(DEADLINE_S) == status


def test_a_handler_that_cannot_be_cancelled_ends_the_process_when_nothing_else_runs(tmp_path: Path) -> None:
    with (
        running(tmp_path, "kitchen:stubborn") as framework,
        framework.connect() as stuck,
        framework.connect() as other,
    ):
        other.invoke({"until": str(tmp_path / "enough")}, invocationID="other")
        stuck.invoke(60, invocationID="stuck")
        assert framework.request("POST", "/cancel", {"invocationID": "stuck"})[0] == 200
        assert stuck.said().reply["statusCode"] == 499
        assert framework.invoke(0).body == "slept"
        (tmp_path / "enough").touch()
        assert other.said().body == "slept"
        assert framework.process.wait(DEADLINE_S) == 70


def test_more_than_its_slots_are_refused(tmp_path: Path) -> None:
    with running(tmp_path, "kitchen:stubborn", PENSTOCK_CONCURRENCY="1") as framework, framework.connect() as wire:
        wire.invoke(30)
        until = time.monotonic() + DEADLINE_S
        while (answer := framework.request("POST", "/invoke", {"payload": 0}))[0] == 200:
            assert time.monotonic() < until
        assert answer == (503, {"error": "all slots are taken"})


def test_exit_hooks_run_when_the_unit_is_stopped(tmp_path: Path) -> None:
    with running(tmp_path, "kitchen:Kitchen") as framework:
        framework.request("GET", "/healthz")
        framework.process.send_signal(signal.SIGTERM)
        assert framework.process.wait(DEADLINE_S) == 0
        assert "cleaned up" in framework.output()


def test_a_socket_path_that_is_too_long_is_named(tmp_path: Path) -> None:
    with running(tmp_path, SERVERLESS_FRAMEWORK_SOCKET_PATH="/tmp/" + "x" * 200) as framework:
        assert framework.process.wait(DEADLINE_S) == 1
        assert "more than 107 bytes" in framework.output()


def test_the_files_need_nothing_but_each_other(tmp_path: Path) -> None:
    install(tmp_path)
    probe = (
        "import sys, penstock.sdk.framework.main as m, penstock; penstock.App, penstock.Cron, penstock.Function\n"
        "ours = {n for n in sys.modules if n.split('.')[0] == 'penstock'}\n"
        "assert m.__file__.startswith(sys.argv[1]), m.__file__\n"
        "print(len(ours))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", probe, str(tmp_path)],
        cwd=tmp_path,
        env={},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= len(tenant.FILES)

"""What a function's framework is told, and what may be asked of a node for one."""

from pathlib import Path

import msgspec
import pytest

from penstock.node import framework
from penstock.node.drivers import Places
from penstock.node.errors import Failed, Refused
from penstock.node.serving import Workers
from penstock.node.tenant import tenant
from penstock.node.unit import check_handoff, check_start
from penstock.wire.tasks import Code, Limits, Serving, UnitHandoff, UnitStart

PLACES = Places(sockets="/s", code="/home/unit/app", framework="/f")
SERVING = Serving(
    worker="unit-echo-worker-abcd1234",
    project_id="prj_1",
    function="echo",
    request="prj_1_echo",
    slots=4,
    socket="framework.sock",
    invoke_path="/invoke",
    health_path="/healthz",
    ready_s=30,
    framework=True,
    handler="main:hello",
    code=Code(sha256="0" * 64, bytes=10),
)
COMMON = {
    "SERVERLESS_REQUEST_ID": "echo",
    "SERVERLESS_WORKER_NAME": "unit-echo-worker-abcd1234",
    "SERVERLESS_WORKER_NAMESPACE": "prj_1",
    "SERVERLESS_FRAMEWORK_SOCKET_PATH": "/s/framework.sock",
    "SERVERLESS_FRAMEWORK_INVOKE_PATH": "/invoke",
    "SERVERLESS_FRAMEWORK_HEALTH_PATH": "/healthz",
}


def handoff(**changes: object) -> UnitHandoff:
    return UnitHandoff(
        unit_id="alc_stock", allocation_id="alc_new", serving=msgspec.structs.replace(SERVING, **changes)
    )


def test_our_framework_is_the_command_and_knows_what_to_run() -> None:
    made = tenant(handoff(), {}, isolated=True, places=PLACES)
    assert made.command == ["python", "/f/framework.py"]
    assert made.env == COMMON | {
        "PENSTOCK_HANDLER": "main:hello",
        "PENSTOCK_CODE": "/home/unit/app",
        "PENSTOCK_CONCURRENCY": "4",
    }


def test_a_framework_of_the_tenants_own_keeps_its_command() -> None:
    request = msgspec.structs.replace(
        handoff(framework=False, handler="", code=None),
        command=["./serve"],
        env={"SERVERLESS_REQUEST_ID": "other", "A": "1"},
    )
    made = tenant(request, {}, isolated=True, places=PLACES)
    assert (made.command, made.env) == (["./serve"], COMMON | {"A": "1"})


def test_the_socket_may_be_named_by_its_path() -> None:
    told = framework.variables(msgspec.structs.replace(SERVING, socket="/tmp/serverless-framework/x.sock"), PLACES)
    assert told["SERVERLESS_FRAMEWORK_SOCKET_PATH"] == "/s/x.sock"


@pytest.mark.parametrize(
    "changes",
    [
        {"socket": "../x.sock"},
        {"socket": "/etc/x.sock"},
        {"socket": "/tmp/serverless-framework/../x.sock"},
        {"socket": ""},
        {"socket": ".."},
        {"socket": "a/b"},
        {"socket": "x" * 65},
        {"invoke_path": "invoke"},
        {"invoke_path": "/a b"},
        {"health_path": "/a\r\nHost: x"},
        {"handler": "os"},
        {"handler": "a:b\0"},
        {"worker": "a=b"},
        {"worker": ""},
        {"project_id": "a/b"},
        {"slots": 0},
        {"slots": 1001},
        {"code": Code(sha256="../../etc/passwd", bytes=1)},
        {"code": Code(sha256="0" * 64, bytes=-1)},
    ],
)
def test_what_is_no_worker_is_refused(changes: dict[str, object]) -> None:
    check_handoff(handoff())
    with pytest.raises(Refused) as refused:
        check_handoff(handoff(**changes))
    assert refused.value.code == "malformed"


def test_stock_serves_nobody() -> None:
    limits = Limits(memory_bytes=1, processes_max=1, cpus=1, scratch_bytes=1)
    stock = UnitStart(unit_id="alc_x", image="i", gpu_uuids=[], limits=limits, allocation_id="alc_x", stock=True)
    check_start(stock)
    with pytest.raises(Refused):
        check_start(msgspec.structs.replace(stock, serving=SERVING))


def test_a_worker_without_a_sidecar_fails() -> None:
    with pytest.raises(Failed) as failed:
        Workers(Path("nowhere")).keys(handoff(), {})
    assert failed.value.code == "no_sidecar"
    assert Workers(Path("nowhere")).keys(UnitHandoff(unit_id="alc_stock", allocation_id="alc_new"), {}) is None

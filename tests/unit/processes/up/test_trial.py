"""The commands that `up` suggests work as they are printed, however the GPUs are given out."""

import shlex
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from penstock.cli import app as tree
from penstock.node import layout
from penstock.node.inventory import Simulated
from penstock.processes.up import banner, trial
from penstock.processes.up.banner import Ready
from penstock.processes.up.folder import Instance, Trial
from penstock.wire.rest import NodeGpu, Sku
from scripted_api import ScriptedApi, json_answer, serve

WHOLE = Sku(
    name="g1.1",
    description="",
    gpu_model="*",
    gpu_counts=[1, 2],
    price_microusd_per_gpu_hour=3_490_000,
    memory_bytes_per_gpu=2 << 30,
    cpus_per_gpu=1.0,
    processes_max=4096,
    scratch_bytes=1 << 30,
    enabled=True,
    gpus_free=0,
)
QUARTER = msgspec.structs.replace(WHOLE, name="quarter", share="mps", share_memory_bytes_min=5 << 30)


def gpus(given: dict[str, str] | str) -> list[NodeGpu]:
    """The slots of a simulated node with this layout."""
    found = Simulated("nod_x", 2, layout.parse(given)).listing().gpus
    return [
        NodeGpu(
            slot_id="slt_x",
            uuid=gpu.uuid,
            index=gpu.index,
            model=gpu.model,
            memory_bytes=gpu.memory_bytes,
            simulated=True,
            health="healthy",
            health_detail="",
            allocation_id=None,
            kind=gpu.kind.value,
            gpu_uuid=gpu.uuid,
            profile=gpu.profile,
            threads_percent=100,
        )
        for gpu in found
    ]


@pytest.mark.parametrize(
    ("given", "skus", "expected"),
    [
        ("whole", [WHOLE], Trial(sku="g1.1")),
        ({}, [WHOLE], Trial(sku="g1.1")),
        ("mps:4", [WHOLE, QUARTER], Trial(sku="quarter")),
        ({"0": "mps:4"}, [WHOLE, QUARTER], Trial(sku="g1.1")),
        (
            "mps:4",
            [WHOLE],
            Trial(sku="share", define="sku set share --gpu-model '*' --price 3.49 --memory 2 --cpus 1 --mps 0"),
        ),
        (
            "mig:1g.10gb,1g.10gb",
            [WHOLE, QUARTER],
            Trial(sku="share", define="sku set share --gpu-model '*' --price 3.49 --memory 2 --cpus 1 --mig 1g.10gb"),
        ),
        ("mps:4", [msgspec.structs.replace(QUARTER, enabled=False)], None),
        ("mps:48", [QUARTER], None),
    ],
)
def test_a_sku_is_suggested_that_the_node_has(
    given: dict[str, str] | str, skus: list[Sku], expected: Trial | None
) -> None:
    found = trial.choose(skus, gpus(given))
    assert found == expected if expected else found.define.endswith("--mps 0")


@pytest.mark.parametrize("given", ["whole", "mps:4", "mig:1g.10gb"])
def test_the_suggested_commands_are_accepted_as_printed(given: str, capfd: pytest.CaptureFixture[str]) -> None:
    with serve() as api:
        chosen = trial.choose([WHOLE], gpus(given))
        instance = Instance(api=api.url, gateway=api.url, key="psk_k", pid=3)
        ready = Ready(instance=instance, simulated_gpus=2, notes=[], trial=chosen)
        text = banner.text(ready, Path("/data"), usual_folder=True, attached=True)
        lines = [shlex.split(line)[1:] for line in text.partition("Try:")[2].partition("\n\n")[0].splitlines() if line]
        _script(api)
        environ = {"PENSTOCK_API_URL": api.url, "PENSTOCK_API_KEY": "psk_k", "PENSTOCK_GATEWAY_URL": api.url}
        codes = {" ".join(line[:2]): tree.run(tree.app, line, environ) for line in lines}
    # The scripted server runs no commands.
    assert codes.pop("alloc exec") in (2, 4)
    assert set(codes.values()) == {0}, capfd.readouterr().err
    assert [line[:2] for line in lines] == [
        *([["sku", "set"]] if chosen.define else []),
        ["alloc", "create"],
        ["alloc", "exec"],
        ["alloc", "release"],
    ]


def _script(api: ScriptedApi) -> None:
    made = {
        **dict.fromkeys(("image", "reason", "purpose", "runtime"), ""),
        **dict.fromkeys(("active_at", "ended_at", "deadline_at", "node_id")),
        "id": f"alc_{'0' * 26}",
        "project_id": "prj_default",
        "name": "demo",
        "purpose": "interactive",
        "sku": "g1.1",
        "gpus": 1,
        "state": "active",
        "labels": {},
        "ports": [],
        "gpu_uuids": [],
        "simulated": True,
        "price_microusd_per_hour": 1,
        "created_at": datetime.now(UTC).isoformat(),
        "version": 1,
        "access_urls": {},
    }
    api.on("PUT", "/skus/share", json_answer(msgspec.to_builtins(WHOLE)))
    api.on("POST", "/allocations", json_answer(made, 201))
    api.on("GET", "/allocations", json_answer({"items": [made], "next_cursor": None}))
    api.on("GET", f"/allocations/{made['id']}", json_answer(made), json_answer(made | {"state": "released"}))
    api.on("POST", f"/allocations/{made['id']}/release", json_answer(made | {"state": "released"}))

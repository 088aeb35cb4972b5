"""Whatever bytes come, decoding ends in a frame within bounds or in `Malformed`."""

from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.fleet import frames
from penstock.wire.link import Ask, GpuReading, GpuReport, Heartbeat, Hello, TaskResult, UnitReport, UnitState
from penstock.wire.tasks import Gpu, Inventory, Outcome

NOW = datetime(2030, 1, 1, tzinfo=UTC)
GPU = Gpu(uuid="GPU-1", index=0, model="Sim", memory_bytes=1 << 30)


def hello(*gpus: Gpu, version: int = 1, agent_version: str = "1") -> Hello:
    return Hello(
        protocol_version=version,
        node_id="nod_default",
        nonce="n",
        agent_version=agent_version,
        boot_id="b",
        inventory=Inventory(gpus=list(gpus), simulated=True),
        production=False,
    )


def heartbeat(units: list[UnitReport], gpus: list[GpuReport] | None = None) -> Heartbeat:
    return Heartbeat(sent_at=NOW, units=units, gpus=gpus or [])


def unit(unit_id: str, exit_code: int | None = None, exit_class: str = "") -> UnitReport:
    return UnitReport(unit_id=unit_id, state=UnitState.EXITED, exit_code=exit_code, exit_class=exit_class)


encode = msgspec.msgpack.encode


@given(st.binary(max_size=200))
def test_random_bytes_are_malformed(data: bytes) -> None:
    with pytest.raises(frames.Malformed):
        frames.decode(data)


@given(st.recursive(st.none() | st.integers(-(2**40), 2**40) | st.text(), st.lists, max_leaves=10), st.text())
def test_maps_of_anything_are_malformed(value: object, key: str) -> None:
    with pytest.raises(frames.Malformed):
        frames.decode_hello(encode({"type": "hello.v1", key: value}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"type": "hello.v1"}',
        encode({str(number): number for number in range(100_000)}),
        encode({"type": "ask.v1", "count": 1} | {str(number): number for number in range(100_000)}),
        b"\x82\xa4type\xa6ask.v1\xa5count" + b"\x91" * 100_000 + b"\xc0",
        b"\x82\xa4type\xa6ask.v1\xa1x" + b"\x91" * 100_000 + b"\xc0",
        b"\x82\xa4type\xa6ask.v1\xa5count\xcf" + b"\xff" * 8,
        b"\x82\xa4type\xa2\xff\xfe\xa5count\x01",
        encode(Ask(count=-1)),
        encode({"type": "challenge.v1", "nonce": "x"}),
        encode(TaskResult(task_id="tsk_1\x00", fence=1, outcome=Outcome.FAILED)),
        encode(heartbeat([unit("alc_\x00")])),
        encode(heartbeat([unit("alc_1"), unit("alc_1")])),
        encode(heartbeat([unit("alc_1", exit_code=2**40)])),
        encode(heartbeat([unit("alc_1", exit_class="\x00")])),
        encode(heartbeat([], [GpuReport(uuid="GPU-1", healthy=True, detail="\x00")])),
        encode(heartbeat([unit(f"alc_{number}") for number in range(frames.UNITS_MAX + 1)])),
    ],
)
def test_rubbish_is_malformed(data: bytes) -> None:
    with pytest.raises(frames.Malformed):
        frames.decode(data)


@pytest.mark.parametrize(
    "frame",
    [
        hello(GPU, GPU),
        hello(agent_version="\x00"),
        hello(msgspec.structs.replace(GPU, uuid="")),
        hello(msgspec.structs.replace(GPU, uuid="\x00")),
        hello(msgspec.structs.replace(GPU, model="\x00")),
        hello(msgspec.structs.replace(GPU, memory_bytes=-1)),
        hello(msgspec.structs.replace(GPU, memory_bytes=2**63)),
        hello(msgspec.structs.replace(GPU, index=2**40)),
        hello(*(msgspec.structs.replace(GPU, uuid=f"GPU-{number}") for number in range(1025))),
        Ask(count=1),
    ],
)
def test_a_hello_out_of_bounds_is_malformed(frame: msgspec.Struct) -> None:
    with pytest.raises(frames.Malformed):
        frames.decode_hello(encode(frame))


@pytest.mark.parametrize("version", [0, 99, -1])
def test_another_version_is_told_what_is_spoken_even_when_its_hello_looks_different(version: int) -> None:
    for data in (encode(hello(version=version)), encode({"type": "hello.v9", "protocol_version": version})):
        with pytest.raises(frames.UnsupportedVersion, match="supported versions: 1"):
            frames.decode_hello(data)


@pytest.mark.parametrize(
    "reading",
    [
        GpuReading(uuid=""),
        GpuReading(uuid="a\x00"),
        GpuReading(uuid="a", temperature_c=1 << 31),
        GpuReading(uuid="a", faults=1 << 40),
        GpuReading(uuid="a", memory_used_bytes=-1),
        GpuReading(uuid="a", ecc_corrected=(1 << 64) - 1),
        GpuReading(uuid="a", power_w=float("nan")),
        GpuReading(uuid="a", power_w=float("inf")),
    ],
)
def test_a_reading_out_of_bounds_is_malformed(reading: GpuReading) -> None:
    for readings in ([reading], [GpuReading(uuid="b")] * 2):
        with pytest.raises(frames.Malformed):
            frames.decode(encode(msgspec.structs.replace(heartbeat([], []), readings=readings)))


def test_good_frames_pass() -> None:
    assert frames.decode_hello(encode(hello(GPU))) == hello(GPU)
    good = heartbeat([unit("alc_1", exit_code=-9, exit_class="killed")], [GpuReport(uuid="GPU-1", healthy=True)])
    assert frames.decode(encode(good)) == good

"""What agents send over the link, decoded within bounds. Anything else is malformed, never a crash."""

import re
from typing import Final

import msgspec

from penstock.fleet import inventory
from penstock.kit.ids import is_id
from penstock.wire.link import (
    PROTOCOL_VERSIONS,
    Ask,
    FromAgent,
    GpuReading,
    Heartbeat,
    Hello,
    LogLines,
    SecretsAsk,
    TaskResult,
)
from penstock.wire.unreadable import UNREADABLE

UNITS_MAX: Final = 4096
LOG_LINES_MAX: Final = 4096
_FIELDS_MAX: Final = 15
_INT32_MAX: Final = (1 << 31) - 1
_INT64_MAX: Final = (1 << 63) - 1
_POWER_W_MAX: Final = 1e6
_WORD: Final = re.compile(r"[A-Za-z0-9._:/-]{1,127}")
_VERSION: Final = re.compile(r"[^\x00-\x1f\x7f]{0,127}")
_DECODE_ERRORS: Final = (*UNREADABLE, OverflowError, ValueError)


class Malformed(Exception):
    """Not a frame of this protocol."""


class UnsupportedVersion(Exception):
    """A protocol that this gateway does not speak."""


class _AnyHello(msgspec.Struct):
    """A hello of any version."""

    protocol_version: int


_decoder = msgspec.msgpack.Decoder(FromAgent)
_version_decoder = msgspec.msgpack.Decoder(_AnyHello)


def decode_hello(data: bytes) -> Hello:
    """The first frame. The version is looked at before anything else, since another's may look different."""
    _check_size(data)
    try:
        version = _version_decoder.decode(data).protocol_version
    except _DECODE_ERRORS as error:
        raise Malformed(f"expected hello: {error}") from error
    if version not in PROTOCOL_VERSIONS:
        raise UnsupportedVersion(f"supported versions: {', '.join(map(str, PROTOCOL_VERSIONS))}")
    frame = decode(data)
    if not isinstance(frame, Hello):
        raise Malformed("expected hello")
    return frame


def decode(data: bytes) -> FromAgent:
    """A frame, if it is one and within bounds."""
    _check_size(data)
    try:
        frame = _decoder.decode(data)
    except _DECODE_ERRORS as error:
        raise Malformed(str(error)) from error
    wrong = _problem(frame)
    if wrong:
        raise Malformed(wrong)
    return frame


def _check_size(data: bytes) -> None:
    """Every frame is a map of a few fields: msgpack's short form. Longer ones are not worth reading."""
    if not data or not 0x80 <= data[0] <= 0x80 + _FIELDS_MAX:
        raise Malformed(f"expected a map of at most {_FIELDS_MAX} fields in msgpack")


def _problem(frame: FromAgent) -> str | None:
    match frame:
        case Hello():
            return _hello_problem(frame)
        case Ask():
            return None if 0 <= frame.count <= _INT32_MAX else "count: min 0"
        case TaskResult() | SecretsAsk():
            return None if is_id("tsk", frame.task_id) else "task_id: not a task's"
        case Heartbeat():
            return _heartbeat_problem(frame)
        case LogLines():
            return None if len(frame.lines) <= LOG_LINES_MAX else f"lines: max {LOG_LINES_MAX} entries"


def _hello_problem(hello: Hello) -> str | None:
    if not (_VERSION.fullmatch(hello.agent_version) and _VERSION.fullmatch(hello.boot_id)):
        return "agent_version and boot_id: max 127 printable characters"
    return inventory.problem(hello.inventory)


def _heartbeat_problem(heartbeat: Heartbeat) -> str | None:
    if len(heartbeat.units) > UNITS_MAX or len(heartbeat.gpus) > inventory.GPUS_MAX:
        return f"units: max {UNITS_MAX} entries, gpus: max {inventory.GPUS_MAX}"
    if len({unit.unit_id for unit in heartbeat.units}) != len(heartbeat.units):
        return "units: a unit_id comes twice"
    if len({gpu.uuid for gpu in heartbeat.gpus}) != len(heartbeat.gpus):
        return "gpus: a uuid comes twice"
    for unit in heartbeat.units:
        code = unit.exit_code
        if not _WORD.fullmatch(unit.unit_id) or not (_WORD.fullmatch(unit.exit_class) or not unit.exit_class):
            return "unit_id and exit_class: max 127 letters, digits and ._:/-"
        if code is not None and not -_INT32_MAX <= code <= _INT32_MAX:
            return "exit_code: 32 bits"
    if any(not (_WORD.fullmatch(gpu.uuid) and _VERSION.fullmatch(gpu.detail)) for gpu in heartbeat.gpus):
        return "gpu.uuid and gpu.detail: max 127 printable characters"
    return _readings_problem(heartbeat.readings)


def _readings_problem(readings: list[GpuReading]) -> str | None:
    if len(readings) > inventory.GPUS_MAX:
        return f"readings: max {inventory.GPUS_MAX} entries"
    if len({reading.uuid for reading in readings}) != len(readings):
        return "readings: a uuid comes twice"
    return next((text for text in map(_reading_problem, readings) if text), None)


def _reading_problem(reading: GpuReading) -> str | None:
    if not _WORD.fullmatch(reading.uuid):
        return "reading.uuid: max 127 letters, digits and ._:/-"
    small = (reading.temperature_c, reading.utilization_percent, reading.faults)
    large = (reading.memory_used_bytes, reading.ecc_corrected, reading.ecc_uncorrected)
    if any(value is not None and not -_INT32_MAX <= value <= _INT32_MAX for value in small):
        return "temperature_c, utilization_percent and faults: 32 bits"
    if any(value is not None and not 0 <= value <= _INT64_MAX for value in large):
        return "memory_used_bytes, ecc_corrected and ecc_uncorrected: 63 bits"
    if reading.power_w is not None and not 0 <= reading.power_w <= _POWER_W_MAX:
        return f"power_w: max {_POWER_W_MAX:g}"
    return None

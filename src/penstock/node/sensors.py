"""What NVML tells of one GPU's condition, and the driver's error events. Only reads.

A sensor that a GPU does not have is None; a GPU that does not answer at all is `Silent`, never a sensor's None.
"""

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import pynvml

_GONE: Final[dict[int, str]] = {
    pynvml.NVML_ERROR_GPU_IS_LOST: "the GPU is lost: the driver cannot reach it",
    pynvml.NVML_ERROR_GPU_NOT_FOUND: "the GPU has disappeared",
    pynvml.NVML_ERROR_NOT_FOUND: "the GPU has disappeared",
    pynvml.NVML_ERROR_RESET_REQUIRED: "the GPU needs a reset",
    pynvml.NVML_ERROR_UNINITIALIZED: "the driver is gone",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the driver is gone",
}
#: Reasons to slow down that the hardware itself gives: heat, power, or the host's brake.
_SLOWDOWNS: Final = (
    (pynvml.nvmlClocksThrottleReasonHwThermalSlowdown, "hardware thermal slowdown"),
    (pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown, "power brake"),
    (pynvml.nvmlClocksThrottleReasonHwSlowdown, "hardware slowdown"),
    (pynvml.nvmlClocksThrottleReasonSwThermalSlowdown, "software thermal slowdown"),
)


class Silent(Exception):
    """The GPU does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at a GPU."""

    temperature_c: int | None = None
    slowdown_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    utilization_percent: int | None = None
    memory_used_bytes: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    #: Memory that is to be replaced by spare rows, or is retired, at the next reset.
    repair_pending: bool = False
    #: There are no spare rows left.
    repair_failed: bool = False
    slowdowns: tuple[str, ...] = ()


def read(uuid: str) -> Sample:
    """Look at the GPU, or Silent."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return _read(handle)
    except pynvml.NVMLError as error:
        raise Silent(_GONE.get(_code(error), f"the GPU does not answer: {error}")) from error


def _read(handle: Any) -> Sample:
    power = _ask(pynvml.nvmlDeviceGetPowerUsage, handle)
    limit = _ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    load = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    _, __, pending, failed = _ask(pynvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
    retiring = _ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    return Sample(
        temperature_c=_ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        slowdown_c=_ask(pynvml.nvmlDeviceGetTemperatureThreshold, handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        power_w=None if power is None else power / 1000,
        power_limit_w=None if limit is None else limit / 1000,
        utilization_percent=None if load is None else int(load.gpu),
        memory_used_bytes=None if memory is None else int(memory.used),
        ecc_corrected=_errors(handle, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        ecc_uncorrected=_errors(handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        repair_pending=bool(pending or retiring),
        repair_failed=bool(failed),
        slowdowns=_slowdowns(_ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0),
    )


def _errors(handle: Any, kind: int) -> int | None:
    """Since the driver was loaded; a reset clears them."""
    return _ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, pynvml.NVML_VOLATILE_ECC)


def _slowdowns(reasons: int) -> tuple[str, ...]:
    return tuple(name for bit, name in _SLOWDOWNS if reasons & bit)


def _ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or None where the GPU has no such sensor or does not want to say. A GPU that is gone raises."""
    try:
        return question(*arguments)
    except pynvml.NVMLError as error:
        if _code(error) in _GONE and _code(error) != pynvml.NVML_ERROR_NOT_FOUND:
            raise
        return None


def _code(error: Exception) -> int:
    return getattr(error, "value", -1)


class Events:
    """Errors as the driver tells them: (uuid, XID)."""

    def __init__(self, uuids: Iterable[str]) -> None:
        self._set = pynvml.nvmlEventSetCreate()
        self._uuids: dict[int | None, str] = {}
        for uuid in uuids:
            self._register(uuid)

    def _register(self, uuid: str) -> None:
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._set)
        except pynvml.NVMLError:
            # Gone, or too old to tell: its sensors still speak for it.
            return
        self._uuids[_address(handle)] = uuid

    @property
    def any(self) -> bool:
        """Whether some GPU tells of its errors."""
        return bool(self._uuids)

    def wait(self, timeout_s: float) -> tuple[str, int] | None:
        """The next error, or None when there was none in time. An error of no GPU that is known has no uuid."""
        try:
            event = pynvml.nvmlEventSetWait_v2(self._set, int(timeout_s * 1000))
        except pynvml.NVMLError as error:
            if _code(error) == pynvml.NVML_ERROR_TIMEOUT:
                return None
            raise
        return self._uuids.get(_address(event.device), ""), int(event.eventData)

    def close(self) -> None:
        """No more events."""
        pynvml.nvmlEventSetFree(self._set)


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value

"""Whether each GPU of this node may be used, and what its sensors show.

A GPU is healthy, degraded (no new work until it has been well for some readings) or failed (a fault of its own: what
runs on it ends, and the fleet takes it back only after a probe). A fault that needs a reset lasts until the agent
starts again or a probe passes. A share of a GPU is what its GPU is. The watch runs in a thread of its own, because a
driver can hang: then the GPUs count as degraded, and heartbeats go on.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

import pynvml
from prometheus_client import Counter, Gauge

from penstock.kit.telemetry import logger
from penstock.node import sensors, xids
from penstock.node.inventory import Inventory, Nvidia
from penstock.node.sensors import Events, Sample, Silent
from penstock.wire.link import GpuReading, GpuReport
from penstock.wire.tasks import Gpu, GpuProbe, GpuProbed

_log = logger(__name__)
_EVENT_S: Final = 0.5
_PAUSE_S: Final = 1.0
_STALLED_S: Final = 30.0
_WINDOW_S: Final = 3600.0
#: A GPU draws more than its limit for moments.
_POWER_MARGIN: Final = 1.1
_DETAIL_CHARS_MAX: Final = 127

_LABELS: Final = ("gpu",)
_temperature = Gauge("penstock_gpu_temperature_celsius", "Temperature of a GPU.", _LABELS)
_power = Gauge("penstock_gpu_power_watts", "Power that a GPU draws.", _LABELS)
_utilization = Gauge("penstock_gpu_utilization_percent", "How busy a GPU is.", _LABELS)
_memory = Gauge("penstock_gpu_memory_used_bytes", "Memory of a GPU that is in use.", _LABELS)
_ecc = Gauge("penstock_gpu_ecc_errors", "Memory errors since the driver was loaded.", ("gpu", "kind"))
_grade = Gauge("penstock_gpu_health", "0 healthy, 1 degraded, 2 failed.", _LABELS)
_xids = Counter("penstock_gpu_xids_total", "Errors that the driver told of, by their number.", ("gpu", "xid"))


class Grade(IntEnum):
    """How a GPU is; a higher one is worse."""

    HEALTHY = 0
    DEGRADED = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """A grade and why. The words hold no reading, so that they change only when the verdict does."""

    grade: Grade
    detail: str = ""


WELL: Final = Verdict(Grade.HEALTHY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Where trouble begins. Zero stands for the GPU's own limit."""

    temperature_max_c: int = 0
    power_max_w: float = 0.0
    corrected_errors_max: int = 1000
    well_readings: int = 3


def judge(sample: Sample, limits: Thresholds, corrected_lately: int = 0) -> Verdict:
    """What a single look says."""
    if sample.repair_failed:
        return Verdict(Grade.FAILED, "its memory cannot be repaired any more: no spare rows are left")
    if sample.ecc_uncorrected:
        return Verdict(Grade.FAILED, "uncorrected memory errors since the driver was loaded")
    hot = limits.temperature_max_c or sample.slowdown_c
    if hot and sample.temperature_c is not None and sample.temperature_c >= hot:
        return Verdict(Grade.DEGRADED, f"too hot: {hot} °C or more")
    heavy = limits.power_max_w or (sample.power_limit_w or 0.0) * _POWER_MARGIN
    if heavy and sample.power_w is not None and sample.power_w > heavy:
        return Verdict(Grade.DEGRADED, f"draws more than {heavy:.0f} W")
    if sample.repair_pending:
        return Verdict(Grade.DEGRADED, "a memory repair waits for a reset of the GPU")
    if corrected_lately > limits.corrected_errors_max:
        return Verdict(Grade.DEGRADED, f"more than {limits.corrected_errors_max} corrected memory errors in an hour")
    if sample.slowdowns:
        return Verdict(Grade.DEGRADED, f"slowed down: {', '.join(sample.slowdowns)}")
    return WELL


class Record:
    """One GPU's verdict over time: worse counts at once, better only after some readings in a row."""

    def __init__(self, limits: Thresholds) -> None:
        self.verdict = WELL
        self.sample: Sample | None = None
        self.faults = 0
        self._limits = limits
        self._lasting = False
        self._well = 0
        self._window: tuple[float, int] | None = None

    def see(self, now: Verdict) -> None:
        """One more look."""
        if now.grade >= self.verdict.grade:
            self._well = 0
            if now.grade > self.verdict.grade:
                self.verdict = now
        elif not self._lasting:
            self._well += 1
            if self._well >= self._limits.well_readings:
                self.verdict, self._well = now, 0

    def measure(self, sample: Sample, at_s: float) -> Verdict:
        """Keep the sample, and judge it with the errors of the last hour."""
        self.sample = sample
        total = sample.ecc_corrected or 0
        if self._window is None or at_s - self._window[0] > _WINDOW_S or total < self._window[1]:
            self._window = (at_s, total)
        return judge(sample, self._limits, total - self._window[1])

    def fault(self, number: int) -> None:
        """The driver told of an error of the hardware."""
        self.faults += 1
        self._well = 0
        self._lasting = self._lasting or xids.FAULTS[number].lasting
        self.verdict = Verdict(Grade.FAILED, xids.describe(number))

    def acquit(self) -> None:
        """A probe has passed."""
        self.verdict, self._lasting, self._well = WELL, False, 0


class Health(Protocol):
    """What the agent asks about its GPUs' condition."""

    def look(self) -> tuple[list[GpuReport], list[GpuReading]]:
        """How each GPU and each share is, and the newest readings."""
        ...

    async def probe(self, params: GpuProbe) -> GpuProbed:
        """Prove that a GPU works."""
        ...


class Unwatched:
    """GPUs without sensors, such as simulated ones: what the inventory says of them counts."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory

    def look(self) -> tuple[list[GpuReport], list[GpuReading]]:
        """The inventory's word, and no readings."""
        return self._inventory.health(), []

    async def probe(self, params: GpuProbe) -> GpuProbed:
        """It is there, nothing is on it, and its memory can be overwritten."""
        known = {_whole(gpu) for gpu in self._inventory.listing().gpus}
        if params.gpu_uuid not in known:
            return _failed(params.gpu_uuid, "this node has no such GPU")
        return await _try_memory(self._inventory, params.gpu_uuid, self._inventory.listing().gpus)


class Monitor:
    """Watches real GPUs. `on_change` is called from the watching thread when a verdict changes."""

    def __init__(
        self,
        inventory: Inventory,
        limits: Thresholds,
        *,
        every_s: float = 5.0,
        on_change: Callable[[], None] = lambda: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inventory = inventory
        self._limits = limits
        self._every_s = every_s
        self._on_change = on_change
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._gpus: list[Gpu] = []
        self._records: dict[str, Record] = {}
        self._looked_at = monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-health", daemon=True)

    def start(self) -> None:
        """Look once, and go on watching."""
        self.sample()
        self._thread.start()

    def close(self) -> None:
        """Stop watching; a driver that hangs is not waited for."""
        self._stop.set()
        self._thread.join(timeout=2 * _EVENT_S)

    def look(self) -> tuple[list[GpuReport], list[GpuReading]]:
        """The latest verdicts and readings. A watch that has stood still says nothing good of any GPU."""
        stalled = self._monotonic() - self._looked_at > _STALLED_S + self._every_s
        with self._lock:
            reports = [_report(gpu, self._verdict(gpu), stalled=stalled) for gpu in self._gpus]
            readings = [_reading(uuid, record) for uuid, record in self._records.items() if record.sample]
        return reports, [] if stalled else readings

    def _verdict(self, gpu: Gpu) -> Verdict:
        """A GPU that is well but not split as it should be gets no work."""
        verdict, problem = self._records[_whole(gpu)].verdict, self._inventory.problem(_whole(gpu))
        return Verdict(Grade.DEGRADED, problem[:_DETAIL_CHARS_MAX]) if problem and verdict == WELL else verdict

    async def probe(self, params: GpuProbe) -> GpuProbed:
        """The GPU answers, has nothing against it, and its memory can be written and read, without a new error."""
        uuid = params.gpu_uuid
        record = self._records.get(uuid)
        if record is None:
            return _failed(uuid, "this node has no such GPU")
        faults = record.faults
        problem = await asyncio.to_thread(self._problem, uuid)
        if problem:
            return _failed(uuid, problem)
        tried = await _try_memory(self._inventory, uuid, self._gpus)
        if not tried.passed:
            return tried
        problem = await asyncio.to_thread(self._problem, uuid)
        with self._lock:
            if problem or record.faults != faults:
                return _failed(uuid, problem or f"a new error came meanwhile: {record.verdict.detail}")
            record.acquit()
        self._on_change()
        return tried

    def _problem(self, uuid: str) -> str:
        try:
            found = self._with_layout(uuid, judge(sensors.read(uuid), self._limits))
        except Silent as silent:
            return str(silent)
        return "" if found.grade is Grade.HEALTHY else found.detail

    def _with_layout(self, uuid: str, found: Verdict) -> Verdict:
        """A GPU that could not be split as it should be gets no work, however well it is."""
        problem = self._inventory.problem(uuid)
        return Verdict(Grade.DEGRADED, problem) if problem and found.grade is Grade.HEALTHY else found

    def sample(self) -> None:
        """Look at all GPUs."""
        self._find_gpus()
        before = self._verdicts()
        for uuid, record in self._records.items():
            try:
                sample = sensors.read(uuid)
                with self._lock:
                    record.see(self._with_layout(uuid, record.measure(sample, self._monotonic())))
            except Silent as silent:
                with self._lock:
                    record.sample = None
                    record.see(Verdict(Grade.FAILED, str(silent)))
            _measure(uuid, record)
        self._looked_at = self._monotonic()
        self._tell_changes(before)

    def _find_gpus(self) -> None:
        """Those that the driver lists, and those that it listed once and that are gone."""
        try:
            listed = self._inventory.listing().gpus
        except pynvml.NVMLError as error:
            _log.warning("gpus_not_listed", error=str(error))
            return
        wholes = {_whole(gpu) for gpu in listed}
        with self._lock:
            self._gpus = [*listed, *(gpu for gpu in self._gpus if _whole(gpu) not in wholes)]
            for uuid in wholes:
                self._records.setdefault(uuid, Record(self._limits))

    def _run(self) -> None:
        """Wait for errors, and look at the sensors now and then, until told to stop."""
        events = self._open_events()
        due = self._monotonic() + self._every_s
        while not self._stop.is_set():
            try:
                self._wait(events)
                if self._monotonic() >= due:
                    due = self._monotonic() + self._every_s
                    self.sample()
            except Exception:  # noqa: BLE001 (supervises the watch: it goes on)
                _log.exception("gpu_watch_failed")
                self._stop.wait(_PAUSE_S)
        if events is not None:
            events.close()

    def _open_events(self) -> Events | None:
        try:
            events = Events(self._records)
        except pynvml.NVMLError as error:
            _log.warning("gpu_errors_not_told", error=str(error))
            return None
        return events

    def _wait(self, events: Events | None) -> None:
        if events is None or not events.any:
            self._stop.wait(min(_EVENT_S, self._every_s))
            return
        told = events.wait(min(_EVENT_S, self._every_s))
        if told is not None:
            self._take(*told)

    def _take(self, uuid: str, number: int) -> None:
        """An error: note it, and tell at once when it counts."""
        _xids.labels(uuid or "unknown", str(number)).inc()
        record = self._records.get(uuid)
        counts = number in xids.FAULTS
        _log.warning("gpu_error", gpu=uuid, error=xids.describe(number), counts=counts)
        if record is None or not counts:
            return
        before = self._verdicts()
        with self._lock:
            record.fault(number)
        _grade.labels(uuid).set(record.verdict.grade)
        self._tell_changes(before)

    def _verdicts(self) -> list[Verdict]:
        return [record.verdict for record in self._records.values()]

    def _tell_changes(self, before: list[Verdict]) -> None:
        if self._verdicts() != before:
            self._on_change()


def open_health(
    inventory: Inventory, limits: Thresholds, *, every_s: float, on_change: Callable[[], None]
) -> Health | Monitor:
    """A watch over real GPUs; simulated ones need none."""
    if not isinstance(inventory, Nvidia):
        return Unwatched(inventory)
    return Monitor(inventory, limits, every_s=every_s, on_change=on_change)


async def _try_memory(inventory: Inventory, uuid: str, gpus: list[Gpu]) -> GpuProbed:
    slots = [gpu.uuid for gpu in gpus if _whole(gpu) == uuid]
    try:
        if not await asyncio.to_thread(inventory.idle, slots):
            return _failed(uuid, "a process is on the GPU")
        if not await inventory.scrub(slots):
            return _failed(uuid, "its memory could not be written and read back")
    except pynvml.NVMLError as error:
        return _failed(uuid, f"the GPU does not answer: {error}")
    return GpuProbed(gpu_uuid=uuid, passed=True)


def _failed(uuid: str, detail: str) -> GpuProbed:
    return GpuProbed(gpu_uuid=uuid, passed=False, detail=detail)


def _whole(gpu: Gpu) -> str:
    """The GPU that a share is part of, or itself."""
    return gpu.parent_uuid or gpu.uuid


def _report(gpu: Gpu, verdict: Verdict, *, stalled: bool) -> GpuReport:
    if stalled and verdict.grade is Grade.HEALTHY:
        verdict = Verdict(Grade.DEGRADED, f"the driver has not answered for {_STALLED_S:.0f} s")
    return GpuReport(
        uuid=gpu.uuid,
        healthy=verdict.grade is Grade.HEALTHY,
        failed=verdict.grade is Grade.FAILED,
        detail=verdict.detail[:_DETAIL_CHARS_MAX],
    )


def _reading(uuid: str, record: Record) -> GpuReading:
    sample = record.sample or Sample()
    return GpuReading(
        uuid=uuid,
        temperature_c=sample.temperature_c,
        power_w=sample.power_w,
        utilization_percent=sample.utilization_percent,
        memory_used_bytes=sample.memory_used_bytes,
        ecc_corrected=sample.ecc_corrected,
        ecc_uncorrected=sample.ecc_uncorrected,
        faults=record.faults,
    )


def _measure(uuid: str, record: Record) -> None:
    _grade.labels(uuid).set(record.verdict.grade)
    sample = record.sample or Sample()
    for gauge, value in (
        (_temperature.labels(uuid), sample.temperature_c),
        (_power.labels(uuid), sample.power_w),
        (_utilization.labels(uuid), sample.utilization_percent),
        (_memory.labels(uuid), sample.memory_used_bytes),
        (_ecc.labels(uuid, "corrected"), sample.ecc_corrected),
        (_ecc.labels(uuid, "uncorrected"), sample.ecc_uncorrected),
    ):
        gauge.set(float("nan") if value is None else value)

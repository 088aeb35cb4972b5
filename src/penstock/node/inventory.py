"""The host's GPUs and shares of them, by NVML where there is a driver, otherwise simulated ones that say so.

`scrub` and `idle` are what a slot's cleanup proof rests on. A MIG device is scrubbed by itself. The shares of a GPU by
MPS are one project's at a time, and their memory is scrubbed when the last of them is given back.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import pynvml

from penstock.kit.errors import Invalid, Unavailable
from penstock.kit.telemetry import logger
from penstock.node import layout, mig, mps, nvml, scrub
from penstock.node.layout import AS_FOUND, Layout, Layouts
from penstock.node.mps import Access, Mps
from penstock.wire.link import GpuReport
from penstock.wire.tasks import Gpu, GpuKind
from penstock.wire.tasks import Inventory as Listing

_log = logger(__name__)
_SIMULATED_MEMORY_BYTES: Final = 80 << 30
_UNIT: Final = "a unit"
_SHARES_MAX: Final = 1024
_ABSENT: Final = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)


class Inventory(Protocol):
    """What an agent must know of its GPUs. `held` are the GPUs and shares that other units have."""

    def listing(self) -> Listing:
        """All GPUs, or the shares of those that are split."""
        ...

    def health(self) -> list[GpuReport]:
        """How each does."""
        ...

    def problem(self, uuid: str) -> str:
        """Why a whole GPU is not given out as it is meant to be; empty when it is."""
        ...

    def devices(self, uuids: Sequence[str]) -> list[str]:
        """The device files that a unit with these GPUs needs."""
        ...

    def mps(self, uuids: Sequence[str]) -> Access | None:
        """How a unit with these reaches the service that they share a GPU by; None for those that share none."""
        ...

    def idle(self, uuids: Sequence[str], held: Collection[str] = ()) -> bool:
        """Whether no process is on these GPUs. The unit's own processes are known to be gone."""
        ...

    async def scrub(self, uuids: Sequence[str], held: Collection[str] = ()) -> bool:
        """Overwrite their memory; whether that was seen to succeed, or is left to the last share of the GPU."""
        ...


class Simulated:
    """GPUs for hosts that have none. Their ids are stable for a node."""

    def __init__(self, node_id: str, count: int, layouts: Layouts = AS_FOUND) -> None:
        gpus = [
            Gpu(
                uuid=f"SIM-{node_id}-{index}",
                index=index,
                model="Simulated GPU",
                memory_bytes=_SIMULATED_MEMORY_BYTES,
                numa_node=0,
            )
            for index in range(count)
        ]
        self._gpus = [share for gpu in gpus for share in _simulated(gpu, layouts.of(gpu.index))]
        if len(self._gpus) > _SHARES_MAX:
            raise Invalid(
                f"{layout.FIELD}: {len(self._gpus)} shares; a node has at most {_SHARES_MAX}", field=layout.FIELD
            )

    def listing(self) -> Listing:
        """All of them, flagged."""
        return Listing(gpus=self._gpus, simulated=True)

    def health(self) -> list[GpuReport]:
        """Always well."""
        return [GpuReport(uuid=gpu.uuid, healthy=True, detail="simulated") for gpu in self._gpus]

    def problem(self, uuid: str) -> str:  # noqa: ARG002 - the Protocol's signature
        """None."""
        return ""

    def devices(self, uuids: Sequence[str]) -> list[str]:  # noqa: ARG002
        """None."""
        return []

    def mps(self, uuids: Sequence[str]) -> Access | None:  # noqa: ARG002
        """There is no service for them."""
        return None

    def idle(self, uuids: Sequence[str], held: Collection[str] = ()) -> bool:  # noqa: ARG002
        """Nothing can run on them."""
        return True

    async def scrub(self, uuids: Sequence[str], held: Collection[str] = ()) -> bool:  # noqa: ARG002
        """They have no memory."""
        return True


def _simulated(gpu: Gpu, wanted: Layout | None) -> list[Gpu]:
    if wanted is None or wanted.kind is GpuKind.WHOLE:
        return [gpu]
    if wanted.kind is GpuKind.MPS:
        return layout.mps_shares(gpu, wanted.shares)
    return [
        layout.share(gpu, f"mig-{n}", GpuKind.MIG, memory_bytes=layout.gigabytes(profile) << 30, profile=profile)
        for n, profile in enumerate(wanted.profiles)
    ]


class Nvidia:
    """Real GPUs, through NVML."""

    def __init__(self, layouts: Layouts = AS_FOUND, held: Collection[str] = (), service: Mps | None = None) -> None:
        pynvml.nvmlInit()
        self._layouts = layouts
        self._service = service
        self._problems: dict[str, str] = {}
        for index, handle in nvml.handles().items():
            self._lay_out(index, handle, held)
        self._domains = nvml.nvlink_domains(nvml.handles().values())

    def _lay_out(self, index: int, handle: Any, held: Collection[str]) -> None:
        """Bring a GPU to its layout, unless something is on it; then, or when it fails, it gets no work."""
        wanted, uuid = self._layouts.of(index), nvml.uuid_of(handle)
        if wanted is None:
            if nvml.in_mig_mode(handle) and not mig.profiles(handle):
                self._problems[uuid] = "it is in MIG mode and has no instances"
            return
        try:
            _change(index, handle, wanted, _on(handle, held))
        except mig.CannotSplit as problem:
            self._problems[uuid] = f"layout {wanted}: {problem}"
            _log.warning("gpu_not_laid_out", gpu_uuid=uuid, layout=str(wanted), problem=str(problem))
        if wanted.kind is GpuKind.MPS and uuid not in self._problems and self._service is not None:
            self._service.start(uuid)

    def listing(self) -> Listing:
        """Ask the driver."""
        driver = nvml.text(pynvml.nvmlSystemGetDriverVersion())
        gpus = [share for index, handle in nvml.handles().items() for share in self._shares(index, handle)]
        return Listing(gpus=gpus, simulated=False, driver_version=driver)

    def _shares(self, index: int, handle: Any) -> list[Gpu]:
        gpu = nvml.gpu(index, handle, self._domains.get(nvml.uuid_of(handle), ""))
        if nvml.in_mig_mode(handle):
            # One without any is shown whole, with the problem that it has.
            return [nvml.mig_device(gpu, device) for device in nvml.mig_handles(handle)] or [gpu]
        wanted = self._layouts.of(index)
        if wanted is not None and wanted.kind is GpuKind.MPS:
            return layout.mps_shares(gpu, wanted.shares)
        return [gpu]

    def health(self) -> list[GpuReport]:
        """A GPU that does not answer, has uncorrected memory errors or not its layout, is not healthy; nor are its
        shares."""
        return [report for index in range(pynvml.nvmlDeviceGetCount()) for report in self._health(index)]

    def _health(self, index: int) -> list[GpuReport]:
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            errors = _uncorrected_errors(handle)
            shares, problem = self._shares(index, handle), self.problem(nvml.uuid_of(handle))
        except pynvml.NVMLError as error:
            return [GpuReport(uuid=f"index-{index}", healthy=False, detail=str(error))]
        detail = f"{errors} uncorrected memory errors" if errors else problem
        return [GpuReport(uuid=share.uuid, healthy=not detail, detail=detail) for share in shares]

    def problem(self, uuid: str) -> str:
        """As it was found at the start."""
        return self._problems.get(uuid, "")

    def devices(self, uuids: Sequence[str]) -> list[str]:
        """The files of the GPUs, those that open MIG devices, and the control files, where they exist."""
        return nvml.devices(_wholes(uuids))

    def mps(self, uuids: Sequence[str]) -> Access | None:
        """The folders of the one GPU's daemon."""
        shared = [layout.whole(uuid) for uuid in uuids if layout.whole(uuid) != uuid]
        return self._service.access(shared[0]) if shared and self._service else None

    def idle(self, uuids: Sequence[str], held: Collection[str] = ()) -> bool:
        """No process, by the driver's own list, which cannot tell the shares of a GPU by MPS apart: while others have
        some, those processes are theirs."""
        return not any(self._tenants(uuid) for uuid in _last(uuids, held))

    def _tenants(self, uuid: str) -> set[int]:
        serving = self._service.servers(uuid) if self._service else set[int]()
        return nvml.occupants(uuid) - serving

    async def scrub(self, uuids: Sequence[str], held: Collection[str] = ()) -> bool:
        """Overwrite all memory of each GPU from a process of its own, which ends its context."""
        results = [await asyncio.to_thread(self._scrub, uuid) for uuid in _last(uuids, held)]
        return all(results)

    def _scrub(self, uuid: str) -> bool:
        ended = self._service.end_servers(uuid) if self._service else True
        return ended and scrub.run(uuid)


def _wholes(uuids: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(map(layout.whole, uuids)))


def _last(uuids: Sequence[str], held: Collection[str]) -> list[str]:
    """What nobody else is on: whole GPUs, MIG devices, and GPUs of which these are the last shares."""
    others = set(map(layout.whole, set(held) - set(uuids)))
    return [uuid for uuid in _wholes(uuids) if uuid in uuids or uuid not in others]


def _on(handle: Any, held: Collection[str]) -> Mapping[str, str]:
    """What is on a GPU or on a part of it, and who has it."""
    uuid = nvml.uuid_of(handle)
    parts = [nvml.uuid_of(device) for device in nvml.mig_handles(handle)] if nvml.in_mig_mode(handle) else []
    found = {part: _UNIT for part in held if layout.whole(part) == uuid or part in parts}
    for part in parts or [uuid]:
        if part not in found and nvml.occupants(part):
            found[part] = "a process"
    return found


def _change(index: int, handle: Any, wanted: Layout, on: Mapping[str, str]) -> None:
    """To the layout, if it is another; CannotSplit when something is in the way."""
    split = nvml.in_mig_mode(handle)
    if wanted.kind is GpuKind.MIG:
        if split and mig.profiles(handle) == sorted(wanted.profiles):
            return
        _must_be_free(on)
        mig.split(index, wanted.profiles)
        return
    if split:
        _must_be_free(on)
        mig.join(index)
    # Between whole and shared by MPS nothing changes on the GPU itself.
    uuid = nvml.uuid_of(handle)
    fitting = {f"{uuid}/mps-{n}" for n in range(wanted.shares)} or {uuid}
    _must_be_free({part: who for part, who in on.items() if who == _UNIT and part not in fitting})


def _must_be_free(on: Mapping[str, str]) -> None:
    if on:
        part, who = next(iter(on.items()))
        raise mig.CannotSplit(f"{who} is on {part}; it changes when the agent starts and the GPU is free")


def open_inventory(
    node_id: str,
    simulated_gpus: int,
    *,
    production: bool,
    layouts: Layouts = AS_FOUND,
    held: Collection[str] = (),
    folder: Path | None = None,
) -> Inventory:
    """Real GPUs, or simulated ones where there is no driver. A driver that is there and fails is an error: simulated
    GPUs would be rented out in place of real ones; and production never simulates.

    `held` are the GPUs and shares that units of an earlier run have; `folder` is for the daemons of MPS.
    """
    try:
        pynvml.nvmlInit()
        service = mps.open_mps(folder) if layouts.mps and folder is not None else None
        return Nvidia(layouts, held, service)
    except pynvml.NVMLError as error:
        if production or nvml.code(error) not in _ABSENT:
            raise Unavailable(f"the NVIDIA driver does not answer: {error}") from error
        if not simulated_gpus:
            raise _no_driver() from error
        return Simulated(node_id, simulated_gpus, layouts)


def require_gpus(simulated_gpus: int) -> None:
    """Pass if this host has a driver, or is to simulate GPUs: before it becomes a node."""
    if simulated_gpus:
        return
    try:
        pynvml.nvmlInit()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        if nvml.code(error) in _ABSENT:
            raise _no_driver() from error


def _no_driver() -> Invalid:
    return Invalid(
        "no NVIDIA driver was found on this host: install it, or say `penstock node join --simulated`"
        " (the setting agent.simulated_gpus) to give out simulated GPUs, on which nothing is computed",
        field="agent.simulated_gpus",
    )


def _uncorrected_errors(handle: Any) -> int:
    try:
        return int(
            pynvml.nvmlDeviceGetTotalEccErrors(
                handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            )
        )
    except pynvml.NVMLError:
        return 0

"""The host's GPUs, by NVML where there is a driver, otherwise simulated ones that say so.

`scrub` and `idle` are what a slot's cleanup proof rests on.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import pynvml

from penstock.kit.errors import Unavailable
from penstock.node import scrub
from penstock.wire.link import GpuReport
from penstock.wire.tasks import Gpu
from penstock.wire.tasks import Inventory as Listing

_SIMULATED_MEMORY_BYTES: Final = 80 << 30
_CONTROL_DEVICES: Final = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


class Inventory(Protocol):
    """What an agent must know of its GPUs."""

    def listing(self) -> Listing:
        """All GPUs."""
        ...

    def health(self) -> list[GpuReport]:
        """How each does."""
        ...

    def devices(self, uuids: Sequence[str]) -> list[str]:
        """The device files that a unit with these GPUs needs."""
        ...

    def idle(self, uuids: Sequence[str]) -> bool:
        """Whether no process is on these GPUs."""
        ...

    async def scrub(self, uuids: Sequence[str]) -> bool:
        """Overwrite their memory; whether that was seen to succeed."""
        ...


class Simulated:
    """GPUs for hosts that have none. Their ids are stable for a node."""

    def __init__(self, node_id: str, count: int) -> None:
        self._gpus = [
            Gpu(
                uuid=f"SIM-{node_id}-{index}",
                index=index,
                model="Simulated GPU",
                memory_bytes=_SIMULATED_MEMORY_BYTES,
                numa_node=0,
            )
            for index in range(count)
        ]

    def listing(self) -> Listing:
        """All of them, flagged."""
        return Listing(gpus=self._gpus, simulated=True)

    def health(self) -> list[GpuReport]:
        """Always well."""
        return [GpuReport(uuid=gpu.uuid, healthy=True, detail="simulated") for gpu in self._gpus]

    def devices(self, uuids: Sequence[str]) -> list[str]:  # noqa: ARG002 - the Protocol's signature
        """None."""
        return []

    def idle(self, uuids: Sequence[str]) -> bool:  # noqa: ARG002
        """Nothing can run on them."""
        return True

    async def scrub(self, uuids: Sequence[str]) -> bool:  # noqa: ARG002
        """They have no memory."""
        return True


class Nvidia:
    """Real GPUs, through NVML."""

    def __init__(self) -> None:
        pynvml.nvmlInit()

    def listing(self) -> Listing:
        """Ask the driver."""
        count = pynvml.nvmlDeviceGetCount()
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        gpus = [_gpu(index, pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]
        return Listing(gpus=gpus, simulated=False, driver_version=driver)

    def health(self) -> list[GpuReport]:
        """A GPU that does not answer, or has uncorrected memory errors, is not healthy."""
        return [_health(index) for index in range(pynvml.nvmlDeviceGetCount())]

    def devices(self, uuids: Sequence[str]) -> list[str]:
        """Each GPU's own file and the control files, where they exist."""
        minors = [pynvml.nvmlDeviceGetMinorNumber(pynvml.nvmlDeviceGetHandleByUUID(uuid)) for uuid in uuids]
        wanted = [*(f"/dev/nvidia{minor}" for minor in minors), *_CONTROL_DEVICES] if minors else []
        return [device for device in wanted if Path(device).exists()]

    def idle(self, uuids: Sequence[str]) -> bool:
        """No compute or graphics process, by the driver's own list."""
        return not any(_occupants(uuid) for uuid in uuids)

    async def scrub(self, uuids: Sequence[str]) -> bool:
        """Overwrite all memory of each GPU from a process of its own, which ends its context."""
        results = [await asyncio.to_thread(scrub.run, uuid) for uuid in uuids]
        return all(results)


_NO_DRIVER: Final = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)


def open_inventory(node_id: str, simulated_gpus: int, *, production: bool) -> Inventory:
    """Real GPUs, or simulated ones where there is no driver. A driver that is there and fails is an error: simulated
    GPUs would be rented out in place of real ones; and production never simulates."""
    try:
        return Nvidia()
    except pynvml.NVMLError as error:
        absent = getattr(error, "value", None) in (
            pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        )
        if production or not absent:
            raise Unavailable(f"the NVIDIA driver does not answer: {error}") from error
        return Simulated(node_id, simulated_gpus)


def _gpu(index: int, handle: Any) -> Gpu:
    pci = pynvml.nvmlDeviceGetPciInfo(handle)
    return Gpu(
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        index=index,
        model=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        pci_address=_text(pci.busId),
        numa_node=_numa_node(_text(pci.busId)),
    )


def _numa_node(pci_address: str) -> int:
    domain, _, rest = pci_address.lower().partition(":")
    try:
        return int(Path(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node").read_text())
    except (OSError, ValueError):
        return -1


def _health(index: int) -> GpuReport:
    uuid = ""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
        errors = _uncorrected_errors(handle)
    except pynvml.NVMLError as error:
        return GpuReport(uuid=uuid or f"index-{index}", healthy=False, detail=str(error))
    detail = f"{errors} uncorrected memory errors" if errors else ""
    return GpuReport(uuid=uuid, healthy=not errors, detail=detail)


def _uncorrected_errors(handle: Any) -> int:
    try:
        return int(
            pynvml.nvmlDeviceGetTotalEccErrors(
                handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            )
        )
    except pynvml.NVMLError:
        return 0


def _occupants(uuid: str) -> list[int]:
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    processes = [
        *pynvml.nvmlDeviceGetComputeRunningProcesses(handle),
        *pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
    ]
    return [process.pid for process in processes]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value

"""What NVML tells of GPUs, their MIG devices and their links, as values of ours. Only reads.

A GPU in MIG mode is its MIG devices. GPUs that reach one another by NVLink, directly, over others or through a switch,
are one domain.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pynvml

from penstock.wire.tasks import Gpu, GpuKind

_CONTROL_DEVICES: Final = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
_MIG_MINORS: Final = Path("/proc/driver/nvidia-caps/mig-minors")


def text(value: str | bytes) -> str:
    """Text, whichever the binding's version returns."""
    return value.decode() if isinstance(value, bytes) else value


def handles() -> dict[int, Any]:
    """All GPUs by index. One that is lost has none, and must not take the others with it."""
    found: dict[int, Any] = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            found[index] = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            if code(error) != pynvml.NVML_ERROR_GPU_IS_LOST:
                raise
    return found


def uuid_of(handle: Any) -> str:
    """A GPU's or a MIG device's."""
    return text(pynvml.nvmlDeviceGetUUID(handle))


def gpu(index: int, handle: Any, domain: str = "") -> Gpu:
    """A whole GPU."""
    pci_address = text(pynvml.nvmlDeviceGetPciInfo(handle).busId)
    return Gpu(
        uuid=uuid_of(handle),
        index=index,
        model=text(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        pci_address=pci_address,
        numa_node=_numa_node(pci_address),
        nvlink_domain=domain,
    )


def _numa_node(pci_address: str) -> int:
    domain, _, rest = pci_address.lower().partition(":")
    try:
        return int(Path(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node").read_text())
    except (OSError, ValueError):
        return -1


def in_mig_mode(handle: Any) -> bool:
    """Whether the GPU is split by MIG now. One that cannot be is not."""
    try:
        return pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError:
        return False


def mig_handles(handle: Any) -> Iterator[Any]:
    """The MIG devices of a GPU."""
    for place in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
        except pynvml.NVMLError as error:
            # The places are numbered, and those that are empty are not found.
            if code(error) not in (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT):
                raise


def mig_device(parent: Gpu, handle: Any) -> Gpu:
    """A MIG device. Its name ends with its profile: `… MIG 1g.10gb`."""
    return Gpu(
        uuid=uuid_of(handle),
        index=parent.index,
        model=parent.model,
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        pci_address=parent.pci_address,
        numa_node=parent.numa_node,
        kind=GpuKind.MIG,
        parent_uuid=parent.uuid,
        profile=text(pynvml.nvmlDeviceGetName(handle)).rpartition("MIG ")[2],
    )


def occupants(uuid: str) -> set[int]:
    """The processes on a GPU or on a MIG device, by the driver's own list."""
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    found = {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    try:
        return found | {process.pid for process in pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle)}
    except pynvml.NVMLError as error:
        # A MIG device draws nothing.
        if code(error) != pynvml.NVML_ERROR_NOT_SUPPORTED:
            raise
        return found


def devices(uuids: Iterable[str]) -> list[str]:
    """The device files for these GPUs and MIG devices, as far as they exist."""
    wanted: list[str] = []
    for uuid in uuids:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        wanted += _mig_files(handle) if uuid.startswith("MIG-") else [_file(handle)]
    return [device for device in dict.fromkeys([*wanted, *_CONTROL_DEVICES]) if wanted and Path(device).exists()]


def _file(handle: Any) -> str:
    return f"/dev/nvidia{pynvml.nvmlDeviceGetMinorNumber(handle)}"


def _mig_files(handle: Any) -> list[str]:
    parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    minor = pynvml.nvmlDeviceGetMinorNumber(parent)
    instance, compute = pynvml.nvmlDeviceGetGpuInstanceId(handle), pynvml.nvmlDeviceGetComputeInstanceId(handle)
    try:
        listed = _MIG_MINORS.read_text()
    except OSError:
        listed = ""
    return [_file(parent), *capabilities(listed, minor, instance, compute)]


def capabilities(listed: str, minor: int, gpu_instance: int, compute_instance: int) -> list[str]:
    """The files that open one MIG device, by the driver's list of them (`gpu0/gi1/ci0/access 4`)."""
    files = dict(line.split() for line in listed.splitlines() if len(line.split()) == 2)
    names = (f"gpu{minor}/gi{gpu_instance}/access", f"gpu{minor}/gi{gpu_instance}/ci{compute_instance}/access")
    return [f"/dev/nvidia-caps/nvidia-cap{files[name]}" for name in names if name in files]


@dataclass(frozen=True, slots=True)
class _Ends:
    """What one GPU's links lead to."""

    address: str
    peers: frozenset[str]


def nvlink_domains(found: Iterable[Any]) -> Mapping[str, str]:
    """GPU → its domain, named after the domain's first GPU; GPUs without links are in none."""
    ends = {uuid_of(handle): _ends(handle) for handle in found}
    domains: dict[str, str] = {}
    for uuid, own in ends.items():
        if uuid in domains or not own.peers:
            continue
        for member in _reach(uuid, ends):
            domains[member] = uuid
    return {uuid: domain for uuid, domain in domains.items() if list(domains.values()).count(domain) > 1}


def _reach(start: str, ends: Mapping[str, _Ends]) -> set[str]:
    """All that can be reached: over a link to another, or to a switch that both have a link to."""
    reached, pending = {start}, [start]
    while pending:
        here = ends[pending.pop()]
        for uuid, there in ends.items():
            linked = here.address in there.peers or there.address in here.peers or here.peers & there.peers
            if uuid not in reached and there.peers and linked:
                reached.add(uuid)
                pending.append(uuid)
    return reached


def _ends(handle: Any) -> _Ends:
    address = text(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()
    return _Ends(address, frozenset(_peers(handle)))


def _peers(handle: Any) -> Iterator[str]:
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED:
                yield text(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId).lower()
        except pynvml.NVMLError:
            # No such link, or no links at all.
            continue


def code(error: Exception) -> int:
    """NVML's number for an error."""
    return getattr(error, "value", -1)

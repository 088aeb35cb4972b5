"""Splitting a GPU by MIG: the mode, the GPU instances, and a compute instance that fills each.

Nothing here asks whether the GPU is in use: the caller has made sure that it is not.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pynvml

from penstock.node import nvml

#: Profiles have numbers with gaps; these are all that the driver's interface knows.
_GPU_PROFILES: Final = range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT)
_COMPUTE_PROFILES: Final = range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT)
_SHARED: Final = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED


class CannotSplit(Exception):
    """Why the GPU could not be brought to its layout."""


def profiles(handle: Any) -> list[str]:
    """The profiles of the MIG devices that there are; none when the GPU is not in MIG mode."""
    if not nvml.in_mig_mode(handle):
        return []
    names = (nvml.text(pynvml.nvmlDeviceGetName(device)) for device in nvml.mig_handles(handle))
    return sorted(name.rpartition("MIG ")[2] for name in names)


def split(index: int, wanted: Sequence[str]) -> None:
    """Bring a GPU to these profiles, or CannotSplit. Instances that were there before are gone."""
    try:
        _set_mode(index, pynvml.NVML_DEVICE_MIG_ENABLE)
        # The mode's change may have reset the GPU, and with it the handle.
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        chosen = [_known(handle, profile) for profile in wanted]
        _destroy_all(handle)
        for info in chosen:
            _create(handle, info)
    except pynvml.NVMLError as error:
        raise CannotSplit(f"it cannot be split into {', '.join(wanted)}: {error}") from error


def join(index: int) -> None:
    """Make a GPU whole again, or CannotSplit."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        if nvml.in_mig_mode(handle):
            _destroy_all(handle)
        _set_mode(index, pynvml.NVML_DEVICE_MIG_DISABLE)
    except pynvml.NVMLError as error:
        raise CannotSplit(f"it cannot be made whole: {error}") from error


def _set_mode(index: int, mode: int) -> None:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    if nvml.in_mig_mode(handle) == (mode == pynvml.NVML_DEVICE_MIG_ENABLE):
        return
    status = pynvml.nvmlDeviceSetMigMode(handle, mode)
    if status != pynvml.NVML_SUCCESS:
        raise CannotSplit("its MIG mode changes with its next reset; reset it, or restart the host")


def _known(handle: Any, profile: str) -> Any:
    known = {nvml.text(info.name).removeprefix("MIG "): info for info in _gpu_profiles(handle)}
    if profile not in known:
        raise CannotSplit(f"it has no MIG profile {profile}; there are: {', '.join(sorted(known))}")
    return known[profile]


def _create(handle: Any, info: Any) -> None:
    instance = pynvml.nvmlDeviceCreateGpuInstance(handle, info.id)
    # The largest fills the instance.
    largest = max(_compute_profiles(instance), key=lambda info: info.sliceCount)
    pynvml.nvmlGpuInstanceCreateComputeInstance(instance, largest.id)


def _destroy_all(handle: Any) -> None:
    for info in _gpu_profiles(handle):
        for instance in _instances(handle, info):
            for compute in _compute_profiles(instance):
                for each in _compute_instances(instance, compute):
                    pynvml.nvmlComputeInstanceDestroy(each)
            pynvml.nvmlGpuInstanceDestroy(instance)


def _instances(handle: Any, info: Any) -> list[Any]:
    count = pynvml.c_uint()
    room = (pynvml.c_nvmlGpuInstance_t * max(1, info.instanceCount))()
    pynvml.nvmlDeviceGetGpuInstances(handle, info.id, room, pynvml.byref(count))
    return list(room[: count.value])


def _compute_instances(instance: Any, info: Any) -> list[Any]:
    count = pynvml.c_uint()
    room = (pynvml.c_nvmlComputeInstance_t * max(1, info.instanceCount))()
    pynvml.nvmlGpuInstanceGetComputeInstances(instance, info.id, room, pynvml.byref(count))
    return list(room[: count.value])


def _gpu_profiles(handle: Any) -> Iterator[Any]:
    for number in _GPU_PROFILES:
        try:
            yield pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number)
        except pynvml.NVMLError as error:
            _absent(error)


def _compute_profiles(instance: Any) -> Iterator[Any]:
    for number in _COMPUTE_PROFILES:
        try:
            yield pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, number, _SHARED)
        except pynvml.NVMLError as error:
            _absent(error)


def _absent(error: pynvml.NVMLError) -> None:
    """A profile that this GPU does not have is passed over; anything else is not."""
    if nvml.code(error) not in (
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_NOT_FOUND,
    ):
        raise error

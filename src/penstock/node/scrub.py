"""Overwriting a GPU's memory after a tenant. CUDA does not clear what it allocates, so the next tenant could read it.

It runs in a process of its own (`python -m penstock.node.scrub UUID`), so that its context, too, is gone afterwards.
"""

import ctypes
import subprocess
import sys
from typing import Final

_CHUNKS: Final = (1 << 30, 64 << 20, 2 << 20)
#: The driver keeps some memory for itself and for the context.
_SHARE_MIN: Final = 0.95
_TIMEOUT_S: Final = 120.0
_CHUNKS_MAX: Final = 4096


def run(uuid: str) -> bool:
    """Scrub one GPU; whether nearly all of its memory was seen overwritten."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-m", __name__],
            env={"CUDA_VISIBLE_DEVICES": uuid, "PATH": "/usr/bin:/bin"},
            timeout=_TIMEOUT_S,
            capture_output=True,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def overwrite() -> float:
    """Take all free memory of the first visible device, zero it, read back; the share of the total that was zeroed."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _check(cuda.cuInit(0))
    _check(cuda.cuDeviceGet(ctypes.byref(device), 0))
    _check(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device))
    _check(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    zeroed = sum(_zero(cuda, size, share) for size in _CHUNKS for share in _allocate(cuda, size))
    _check(cuda.cuCtxDestroy_v2(context))
    return zeroed / (total.value or 1)


def _allocate(cuda: ctypes.CDLL, size: int) -> list[ctypes.c_uint64]:
    taken: list[ctypes.c_uint64] = []
    for _ in range(_CHUNKS_MAX):
        pointer = ctypes.c_uint64()
        if cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)) != 0:
            break
        taken.append(pointer)
    return taken


def _zero(cuda: ctypes.CDLL, size: int, pointer: ctypes.c_uint64) -> int:
    _check(cuda.cuMemsetD8_v2(pointer, ctypes.c_ubyte(0), ctypes.c_size_t(size)))
    sample = (ctypes.c_ubyte * 4096)(*([1] * 4096))
    last = ctypes.c_uint64(pointer.value + size - len(sample))
    _check(cuda.cuMemcpyDtoH_v2(sample, last, ctypes.c_size_t(len(sample))))
    return size if not any(sample) else 0


def _check(code: int) -> None:
    if code != 0:
        raise OSError(code, "CUDA driver call failed")


if __name__ == "__main__":
    sys.exit(0 if overwrite() >= _SHARE_MIN else 1)

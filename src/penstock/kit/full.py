"""Disks without space: how they are recognised, and counted by what was to be written."""

import errno
import os
from typing import Final

from prometheus_client import Counter

FULL: Final = Counter("penstock_storage_full_total", "Writes that found no space on a disk.", ["what"])
_NUMBERS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_WORDS: Final = (*(os.strerror(number) for number in sorted(_NUMBERS)), "XMinioStorageFull")


def is_full(error: BaseException) -> bool:
    """Whether a disk had no space, ours or that of the server who says so."""
    return (isinstance(error, OSError) and error.errno in _NUMBERS) or any(word in str(error) for word in _WORDS)

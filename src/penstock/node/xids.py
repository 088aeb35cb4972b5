"""What the driver's error numbers (XIDs) say of a GPU.

Only the hardware's and the driver's own faults count against it; a tenant's wrong kernel raises XIDs, too, and must not
take a GPU out of service. A number in neither table is counted and logged, and changes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Fault:
    """What a number means. A `lasting` one needs a reset of the GPU: time alone does not mend it."""

    meaning: str
    lasting: bool


#: These make a GPU fail.
FAULTS: Final[Mapping[int, Fault]] = {
    46: Fault("the GPU stopped processing", lasting=True),
    48: Fault("double-bit memory error", lasting=True),
    62: Fault("internal micro-controller halted", lasting=True),
    63: Fault("memory row remapped or page retired", lasting=False),
    64: Fault("memory row could not be remapped", lasting=True),
    74: Fault("NVLink error", lasting=True),
    79: Fault("the GPU has fallen off the bus", lasting=True),
    92: Fault("high rate of single-bit memory errors", lasting=False),
    94: Fault("contained memory error", lasting=False),
    95: Fault("uncontained memory error", lasting=True),
    119: Fault("the GPU's system processor timed out", lasting=True),
    120: Fault("the GPU's system processor failed", lasting=True),
    140: Fault("unrecovered memory error", lasting=True),
}
#: These are the program's that ran on it.
APPLICATION: Final[Mapping[int, str]] = {
    13: "graphics engine exception, such as an index out of bounds",
    31: "memory page fault of a program",
    43: "a program's context was stopped after its own error",
    45: "a program's context was cleaned up after it ended",
    68: "video decoder exception",
}


def describe(number: int) -> str:
    """The number with its meaning, as people see it."""
    known = FAULTS[number].meaning if number in FAULTS else APPLICATION.get(number, "unknown")
    return f"XID {number}: {known}"

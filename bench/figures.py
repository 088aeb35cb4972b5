"""A figure and how it is printed; statistics on samples."""

import json
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

REPETITIONS = 3


@dataclass(frozen=True)
class Figure:
    """One measured value beside its reference. `at_least` says which side of the bar is good."""

    name: str
    value: float
    unit: str
    reference: float
    bar: float
    at_least: bool
    ratio: float

    @property
    def holds(self) -> bool:
        """Whether the bar is met; what has none is only told."""
        if self.bar < 0:
            return True
        return self.ratio >= self.bar if self.at_least else self.ratio <= self.bar

    def line(self) -> str:
        """The JSON line."""
        return json.dumps(
            {
                "name": self.name,
                "value": round(self.value, 3),
                "unit": self.unit,
                "reference": round(self.reference, 3),
                "ratio": round(self.ratio, 3),
                "bar": f"{'>=' if self.at_least else '<='} {self.bar}" if self.bar >= 0 else "none",
                "holds": self.holds,
            }
        )


def rate(name: str, value: float, unit: str, reference: float, bar: float) -> Figure:
    """More is better: value / reference must reach the bar."""
    return Figure(name, value, unit, reference, bar, at_least=True, ratio=value / reference)


def latency(name: str, value: float, unit: str, reference: float, bar: float) -> Figure:
    """Less is better: value / reference must stay under the bar."""
    return Figure(name, value, unit, reference, bar, at_least=False, ratio=value / reference)


def bound(name: str, value: float, unit: str, limit: float) -> Figure:
    """An absolute limit."""
    return Figure(name, value, unit, limit, 1.0, at_least=False, ratio=value / limit)


def none(name: str, value: int, unit: str) -> Figure:
    """A count that must be zero."""
    return Figure(name, value, unit, 0, 0.0, at_least=False, ratio=float(value))


def unmeasured(name: str, unit: str, bar: float) -> Figure:
    """A rate whose reference could not be had here: the bar is missed, not skipped."""
    return Figure(name, 0.0, unit, 0.0, bar, at_least=True, ratio=-1.0)


def fact(name: str, value: float, unit: str) -> Figure:
    """Something to know, without a bar."""
    return Figure(name, value, unit, value, -1.0, at_least=True, ratio=1.0)


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample below which `share` of all lie."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def median_of_three(measure: Callable[[], Awaitable[float]]) -> float:
    """Three runs, the middle one."""
    return statistics.median([await measure() for _ in range(REPETITIONS)])

"""When a node dials again, so that a fleet that lost its gateway does not come back as one.

The first attempt after a sound connection comes soon: mostly it is this node alone that lost it. After a failure the
pause is drawn from a range that doubles each time and is never shorter than the time in which the gateway can let all
of its nodes in, which it tells them while they are connected. Where that is soon, pauses stay short however long the
gateway is away: a small fleet is back within two seconds. The number outlives the agent, so that a node that starts
while its gateway is away dials as the others do. A gateway that is busy says when to come back.
"""

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

#: A connection that stood this long was sound.
SOUND_AFTER_S: Final = 10.0
_SHORTEST_S: Final = 0.05
_BASE_S: Final = 0.1
_CAP_S: Final = 10.0
#: The longest pause of a fleet that its gateway lets in at once.
_SMALL_CAP_S: Final = 1.0
_SOON_S: Final = 1.0
#: Whatever a gateway says, a node does not wait longer.
_TOLD_MAX_S: Final = 60.0


@dataclass(slots=True)
class Crowd:
    """Seconds in which the gateway can let all of its nodes in again, by its own word; kept in a file if there is one.

    A node that no gateway has told of others counts as one of a small fleet.
    """

    spread_s: float = 0.0
    file: Path | None = None

    @classmethod
    def kept_in(cls, file: Path) -> "Crowd":
        """The crowd as it was when the agent last ran."""
        crowd = cls()
        with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            crowd.tell(msgspec.json.decode(file.read_bytes(), type=float))
        crowd.file = file
        return crowd

    def tell(self, spread_s: float) -> None:
        """The gateway just said so."""
        before, self.spread_s = self.spread_s, min(max(0.0, spread_s), _TOLD_MAX_S)
        if self.file is not None and round(before, 1) != round(self.spread_s, 1):
            # Of use, not of need: a disk that is full keeps no node from its gateway.
            with suppress(OSError):
                self.file.write_bytes(msgspec.json.encode(self.spread_s))

    @property
    def cap_s(self) -> float:
        """The longest range of pauses: four times what the gateway needs for all, within bounds."""
        return min(_CAP_S, max(_SMALL_CAP_S, 4 * self.spread_s))


class Pace:
    """The pauses of one connection that is to be kept. A `second` one of each node comes after the others' first."""

    def __init__(
        self, crowd: Crowd, *, second: bool = False, uniform: Callable[[float, float], float] = random.uniform
    ) -> None:
        self._crowd = crowd
        self._second = second
        self._uniform = uniform
        self._failures = 0
        self._retry_after_s = 0.0

    def busy(self, retry_after_s: float) -> None:
        """The gateway asked to be left alone for so long."""
        self._retry_after_s = min(max(0.0, retry_after_s), _TOLD_MAX_S)

    def pause_s(self, *, stood_s: float) -> float:
        """How long to wait after a connection, or an attempt at one, that lasted so long."""
        retry_after_s, self._retry_after_s = self._retry_after_s, 0.0
        self._failures = 0 if stood_s > SOUND_AFTER_S else self._failures + 1
        if retry_after_s:
            return self._uniform(retry_after_s, 2 * retry_after_s)
        spread_s = self._crowd.spread_s
        if not self._failures:
            return self._uniform(_SHORTEST_S, max(_BASE_S, min(_SOON_S, spread_s)))
        first = spread_s if self._second else 0.0
        longest = max(spread_s, min(self._crowd.cap_s, _BASE_S * 2.0 ** min(self._failures, 20)))
        return first + self._uniform(_SHORTEST_S, longest)

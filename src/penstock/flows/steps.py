"""The saga of an allocation as a table of do and undo. Pure: no clock, no I/O.

When a step fails, the undo of every step up to and including it runs in reverse: a step that failed may have had half
of its effect. Every action is idempotent, so a saga that was lost starts again at the top.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Verdict(StrEnum):
    """How an action ended. `stale`: the row has moved on, look again. `hopeless`: failed, and no retry helps."""

    DONE = "done"
    FAILED = "failed"
    HOPELESS = "hopeless"
    STALE = "stale"


class Course(StrEnum):
    """What the row asks for."""

    PROVISION = "provision"
    UNDO = "undo"
    RELEASE = "release"
    REST = "rest"


@dataclass(frozen=True)
class Look:
    """The row, as far as the saga needs it. Two looks that are equal ask for the same."""

    course: Course
    state: str
    fence: int
    #: Whether the node has to have an environment of the tenant's.
    runtime: bool = False


@dataclass(frozen=True)
class Order:
    """The input of an action. `reason` is what went wrong before it, if anything."""

    allocation_id: str
    fence: int
    attempt: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Result:
    """The answer of an action; `reason` says why it did not end well."""

    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True)
class Action:
    """An activity. A local one is a short transaction; the others wait for a node.

    `attempts_max` counts orders of the saga, each with an effect of its own on the node.
    """

    name: str
    local: bool = True
    attempts_max: int = 1


@dataclass(frozen=True)
class Step:
    """What to do, and how to undo it."""

    do: Action
    undo: Action | None


LOOK: Final = Action("look")
PREPARE_RUNTIME: Final = Action("prepare_runtime", local=False)
START_UNIT: Final = Action("start_unit", local=False)
UNDO_START: Final = Action("undo_start", local=False, attempts_max=3)
STOP_UNIT: Final = Action("stop_unit", local=False, attempts_max=3)
ACTIVATE: Final = Action("activate")
CONDEMN: Final = Action("condemn")
FAIL: Final = Action("fail")
FINISH: Final = Action("finish")
ABANDON: Final = Action("abandon")

#: `look` takes a placed request up; slots were claimed when it was made, and `fail` gives them back. An environment
#: that was built stays on its node, for the next unit that needs it.
PROVISION: Final = (
    Step(LOOK, FAIL),
    Step(PREPARE_RUNTIME, None),
    Step(START_UNIT, UNDO_START),
    Step(ACTIVATE, None),
)
#: A failure of one of these is undone; the others are tried again by the next saga.
DOES: Final = tuple(step.do for step in PROVISION)
#: In the order in which they run.
UNDO: Final = tuple(step.undo for step in reversed(PROVISION) if step.undo is not None)
ACTIONS: Final = (LOOK, PREPARE_RUNTIME, START_UNIT, UNDO_START, STOP_UNIT, ACTIVATE, CONDEMN, FAIL, FINISH, ABANDON)

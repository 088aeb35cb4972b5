"""What can go wrong on a node. The codes travel in task results and tunnel aborts, so they are stable."""

from typing import Final

#: The node's disk has no space.
DISK_FULL: Final = "disk_full"
#: This node could not get the code of a function.
CODE_UNAVAILABLE: Final = "code_unavailable"
#: This node could not unpack the code of a function.
CODE_NOT_UNPACKED: Final = "code_not_unpacked"


class NodeError(Exception):
    """Base of all expected failures on a node: a stable code and a sentence."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class NoUnit(NodeError, KeyError):
    """No unit of that id runs here."""

    def __init__(self, unit_id: str) -> None:
        super().__init__("no_unit", f"no unit {unit_id} runs on this node")

    def __str__(self) -> str:
        """The sentence; KeyError would quote it."""
        return self.detail


class Refused(NodeError):
    """Not done, and without any side effect."""


class Failed(NodeError):
    """Tried and not achieved; whatever was begun has been undone."""


class Unlinked(NodeError):
    """The other side of a connection is not there, or is not who it must be."""

"""Imports that only a unit can make: `with app.imports():`.

Inside a unit an import that fails is an error as anywhere. Elsewhere, as on the laptop that deploys the file, an
ImportError in the block is noted, and the rest of the block is passed over: its names are then not defined here.
"""

from types import TracebackType

#: Set by the framework, before it imports the tenant's file.
_inside: list[bool] = []
#: Imports that failed here, in their order.
missing: list[str] = []


def inside() -> None:
    """This process is a unit's: imports are real from now on."""
    _inside[:] = [True]


class Imports:
    """The context of a block of imports."""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: "type[BaseException] | None", error: "BaseException | None", frames: "TracebackType | None"
    ) -> bool:
        """Pass over an ImportError, except in a unit."""
        if _inside or not isinstance(error, ImportError):
            return False
        missing.append(error.name or str(error))
        return True

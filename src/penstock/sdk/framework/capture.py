"""Gives what handlers print to the invocation that printed it. What is printed before there is one goes to the first
as well; all else that no invocation printed goes to the unit's own log alone."""

import os
import sys
from typing import Any, Protocol, TextIO, cast

from penstock.sdk.functions import invocation

_EARLY_CHARS_MAX = 64 << 10


class Listener(Protocol):
    """An invocation that hears what its code prints, until it is `over`."""

    over: bool

    def write(self, stream: str, text: str) -> None:
        """More of it."""
        ...


class Router:
    """Stands in for a standard stream. All but writing is the real stream's business."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self.buffer = _Binary(self)

    def write(self, text: str) -> int:
        """To whom it belongs."""
        listener = cast("Listener | None", None if _forked else invocation.running())
        if listener is None or listener.over:
            early.keep(self._name, text)
            return self._stream.write(text)
        listener.write(self._name, text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Several at once."""
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        """Nobody types here."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Binary:
    """The stream's bytes, for programs that write those."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def write(self, data: Any) -> int:
        content = bytes(data)
        self._router.write(content.decode("utf-8", "backslashreplace"))
        return len(content)

    def flush(self) -> None:
        self._router.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._router._stream.buffer, name)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


class Early:
    """What is printed while the worker starts, for its first invocation to tell."""

    def __init__(self) -> None:
        self._said: list[tuple[str, str]] = []
        self._room = _EARLY_CHARS_MAX

    def keep(self, stream: str, text: str) -> None:
        """As long as there is room, and nobody took it."""
        if self._room > 0:
            self._said.append((stream, text[: self._room]))
            self._room -= len(text) + 1

    def take(self) -> "list[tuple[str, str]]":
        """All of it, once."""
        said, self._said, self._room = self._said, [], 0
        return said


early = Early()
#: Not empty in a child that a handler forked: it has nobody to tell, so it writes to the unit's log.
_forked: list[bool] = []


def install() -> None:
    """From now on, for the whole process."""
    os.register_at_fork(after_in_child=lambda: _forked.append(True))
    sys.stdout = cast("TextIO", Router(sys.stdout, "stdout"))
    sys.stderr = cast("TextIO", Router(sys.stderr, "stderr"))

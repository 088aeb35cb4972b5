"""A handler's failure as its owner should see it: the exception, and the frames of the tenant's own code."""

import os
from typing import Any

_CHARS_MAX = 32 << 10
_MESSAGE_CHARS_MAX = 4 << 10
_FRAMES_MAX = 64


def message(error: BaseException) -> str:
    """What it says, in a bounded length; an exception may fail even at that."""
    try:
        text = str(error)
    except Exception as second:  # noqa: BLE001 - a tenant's own class
        text = f"(its text cannot be shown: {type(second).__name__})"
    return clean(text)[:_MESSAGE_CHARS_MAX]


def clean(text: str) -> str:
    """The text without what UTF-8 cannot hold."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def traceback(error: BaseException) -> str:
    """The traceback as Python prints it, without our frames. Where it is too long, its middle is left out."""
    from traceback import TracebackException

    shown = TracebackException.from_exception(error, limit=-_FRAMES_MAX, compact=True)
    _only_theirs(shown)
    try:
        text = clean("".join(shown.format()))
    except RecursionError:
        text = f"{type(error).__name__}: {message(error)}\n"
    half = _CHARS_MAX // 2
    return text if len(text) <= _CHARS_MAX else f"{text[:half]}\n[…]\n{text[-half:]}"


def _only_theirs(shown: Any) -> None:
    waiting, seen = [shown], set[int]()
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        stack: Any = part.stack
        stack[:] = [frame for frame in stack if not _ours(frame.filename)]
        waiting += [part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or ())]


def _ours(filename: str) -> bool:
    return filename.startswith((*_FOLDERS, "<frozen importlib"))


def _folders() -> tuple[str, ...]:
    """Whose frames say nothing to a tenant: this folder and its neighbour, as frames themselves name them."""
    sdk = _ours.__code__.co_filename.rpartition(os.sep)[0].rpartition(os.sep)[0]
    return tuple(f"{sdk}{os.sep}{name}{os.sep}" for name in ("framework", "functions"))


_FOLDERS = _folders()

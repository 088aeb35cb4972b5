"""Secrets in files that only their owner can read, written whole or not at all."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path


def keep(file: Path, value: str) -> None:
    """Write `value` so that a reader sees the old text or the new one, never a part."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as output:  # noqa: PTH123
        output.write(value)
        output.flush()
        os.fsync(descriptor)
    temporary.replace(file)


def _random() -> str:
    return secrets.token_urlsafe(24)


def made_once(file: Path, make: Callable[[], str] = _random) -> str:
    """The secret in `file`, made the first time."""
    try:
        kept = file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        kept = ""
    if not kept:
        kept = make()
        keep(file, kept)
    return kept

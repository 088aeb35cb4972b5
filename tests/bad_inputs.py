"""The rows of bad_inputs.csv, and the check of each."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

C = TypeVar("C", bound=Callable[..., Any])
_FILE = Path(__file__).parent / "data" / "bad_inputs.csv"


def rows(surface: str) -> list[str]:
    """The ids of all rows of a surface; a row without a check fails its test."""
    entries = csv.DictReader(_FILE.read_text(encoding="utf-8").splitlines())
    return [entry["id"] for entry in entries if entry["surface"] == surface]


class Checks(dict[str, Callable[..., Any]]):
    """The check of each row, by its id."""

    def row(self, row_id: str) -> Callable[[C], C]:
        """The check of one row."""

        def register(check: C) -> C:
            self[row_id] = check
            return check

        return register

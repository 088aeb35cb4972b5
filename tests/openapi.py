"""The committed document of the API, as tests of clients ask it."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

_HOLE = re.compile(r"\{\w+\}")
_FILE = Path(__file__).parents[1] / "docs" / "api" / "openapi.json"


@cache
def document() -> dict[str, Any]:
    """The document."""
    found: dict[str, Any] = json.loads(_FILE.read_text())
    return found


def query_parameters(method: str, path: str) -> set[str]:
    """Names of the query parameters of an operation."""
    parameters = _operation(method, path).get("parameters", [])
    return {parameter["name"] for parameter in parameters if parameter["in"] == "query"}


def _operation(method: str, path: str) -> dict[str, Any]:
    paths = document()["paths"]
    fitting = [template for template in paths if re.fullmatch(_HOLE.sub(".+", template), path)]
    closest = max(fitting, key=lambda template: len(_HOLE.sub("", template)))
    operation: dict[str, Any] = paths[closest][method.lower()]
    return operation

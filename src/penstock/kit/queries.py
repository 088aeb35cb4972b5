"""Query parameters that nobody knows are refused: a misspelt one must not look as if it had been heard."""

from collections.abc import Collection
from typing import Final
from urllib.parse import parse_qsl

from penstock.kit.errors import Invalid

_NAME_CHARACTERS_MAX: Final = 64


def unknown_parameter(name: str) -> Invalid:
    """400 that names the parameter."""
    shown = name[:_NAME_CHARACTERS_MAX]
    return Invalid(f"{shown!a}: unknown query parameter", field=shown)


def read(query: str, known: Collection[str]) -> dict[str, str]:
    """The parameters of a route outside the api; the last of each counts."""
    try:
        query.encode()
        found = dict(parse_qsl(query, keep_blank_values=True, errors="strict"))
    except UnicodeError as error:
        raise Invalid("the query must be valid UTF-8", field="query") from error
    for name, value in found.items():
        if name not in known:
            raise unknown_parameter(name)
        if "\0" in value:
            raise Invalid(f"{name} may not contain NUL", field=name)
    return found

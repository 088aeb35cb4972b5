"""Repeated keys and unsafe characters in JSON text, found in one pass that builds no document.

Time is linear in the text and memory in its depth and in the keys of the objects that are open: nothing is kept for an
element of a list, and a path is worked out only for the place that is refused.
"""

import re
from collections.abc import Callable
from json.decoder import JSONDecodeError
from json.decoder import scanstring as _scan  # pyright: ignore[reportAttributeAccessIssue]
from typing import Final, NoReturn, cast

from penstock.kit.errors import Invalid

#: Python reads no larger number; the frameworks in units are Python.
DIGITS_MAX: Final = 4300
_UNSAFE: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
#: A plain string (a key if a colon follows), an object's bounds, any other string, or a long number.
_TOKEN: Final = re.compile(r'"([ !#-\[\]-~]*)"([ \t\r\n]*:)?|[{}"]|[0-9]{20,}')
_COLON: Final = re.compile(r"[ \t\r\n]*:")
_PLACE: Final = re.compile(r'[\[\]{},"]')
#: Text and where a string in it begins → the string and where it ends.
scanstring = cast("Callable[[str, int], tuple[str, int]]", _scan)
_KEY_CHARACTERS_MAX: Final = 64
_PATH_CHARACTERS_MAX: Final = 255


def check(text: str) -> None:
    """Pass, or Invalid naming the place. Text that is no JSON is read as far as it is."""
    open_objects: list[set[str]] = []
    at = 0
    while (token := _TOKEN.search(text, at)) is not None:
        plain, colon, at = token[1], token[2], token.end()
        if plain is None and token[0] == '"':
            plain, at = _string(text, token.start())
            colon = _COLON.match(text, at)
        if plain is not None:
            if colon is not None and open_objects:
                _add(open_objects[-1], plain)
        elif token[0] == "{":
            open_objects.append(set())
        elif token[0] != "}":
            _check_number(token[0])
        elif open_objects:
            open_objects.pop()


def _string(text: str, start: int) -> tuple[str, int]:
    """The string that begins here and where it ends; Invalid if a character of it is unsafe."""
    try:
        value, end = scanstring(text, start + 1)
    except JSONDecodeError:
        return "", len(text)
    unsafe = _UNSAFE.search(value)
    if unsafe is not None:
        _refuse(path(text, start) or "$", unsafe[0])
    return value, end


def _refuse(place: str, character: str) -> NoReturn:
    if "\ud800" <= character <= "\udfff":
        raise Invalid(f"{place}: invalid unicode, half of a surrogate pair", field=place)
    raise Invalid(f"{place}: control characters are not allowed (U+{ord(character):04X})", field=place)


def _add(keys: set[str], key: str) -> None:
    if key in keys:
        name = key[:_KEY_CHARACTERS_MAX]
        raise Invalid(f"duplicate key {name!a}", field=name)
    keys.add(key)


def _check_number(digits: str) -> None:
    if len(digits) > DIGITS_MAX:
        raise Invalid("body is nested too deeply or holds too large a number", field="$")


def path(text: str, position: int) -> str:
    """Where in the document the string at this position stands; a key stands in its object. Cut when it is long."""
    steps: list[int | str | None] = []
    at = 0
    while (found := _PLACE.search(text, at, position)) is not None:
        at = found.end()
        match found[0]:
            case "[":
                steps.append(0)
            case "{":
                steps.append(None)
            case '"':
                at = _step_by_key(text, found.start(), steps)
            case "," if steps:
                steps[-1] = step + 1 if isinstance(step := steps[-1], int) else None
            case "]" | "}" if steps:
                steps.pop()
            case _:
                pass
    return _written(steps)


def _step_by_key(text: str, start: int, steps: list[int | str | None]) -> int:
    """Note the key that begins here, if it is one; where the string ends."""
    value, end = scanstring(text, start + 1)  # it was read before
    if steps and steps[-1] is None and _COLON.match(text, end):
        steps[-1] = value[:_PATH_CHARACTERS_MAX]
    return end


def _written(steps: list[int | str | None]) -> str:
    written, size = [], 0
    for step in steps:
        if step is None or size > _PATH_CHARACTERS_MAX:
            break
        written.append(f"[{step}]" if isinstance(step, int) else f".{step}")
        size += len(written[-1])
    whole = "".join(written).removeprefix(".")
    return whole if len(whole) <= _PATH_CHARACTERS_MAX else f"{whole[:_PATH_CHARACTERS_MAX]}…"

"""Strict decoding of JSON bodies: what is wrong, and where, in words for the sender.

Beyond what the schema says, a body may not repeat a key, nor carry characters that break databases, logs or terminals
(control characters except tab and line ends, bidirectional overrides, halves of surrogate pairs).
"""

import json
import re
from typing import Any, Final, NoReturn, TypeVar

import msgspec

from penstock.kit.errors import Invalid
from penstock.kit.text import dollars

T = TypeVar("T")

_UNSAFE: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_LOCATED: Final = re.compile(r"(?s)(.*) - at (?:`key` in )?`\$\.?(.*?)`")
_BYTE: Final = re.compile(r"\(byte (\d+)\)$")
_NAMES: Final = {
    "int": "an integer",
    "str": "a string",
    "bool": "true or false",
    "float": "a number",
    "object": "an object",
    "array": "a list",
    "null": "null",
}
#: What msgspec says → what we say. The groups are filled in.
_PHRASES: Final = (
    (re.compile(r"Expected `(?:str|bytes)` of length <= (\d+)"), "max {0} characters"),
    (re.compile(r"Expected `(?:str|bytes)` of length >= (\d+)"), "min {0} characters"),
    (re.compile(r"Expected `(?:array|object)` of length <= (\d+)"), "max {0} entries"),
    (re.compile(r"Expected `(?:array|object)` of length >= (\d+)"), "min {0} entries"),
    (re.compile(r"Expected `str` matching regex '(.*)'"), "must match the pattern {0}"),
    (re.compile(r"Expected `int` that's a multiple of (\d+)"), "must be a multiple of {0}"),
    (re.compile(r"Expected `\w+` <= (\S+)"), "max {0}"),
    (re.compile(r"Expected `\w+` >= (\S+)"), "min {0}"),
    (re.compile(r"Expected `\w+` < (\S+)"), "must be less than {0}"),
    (re.compile(r"Expected `\w+` > (\S+)"), "must be greater than {0}"),
)
#: Money is counted in micro-dollars; who typed dollars is told the limit in dollars too.
_MONEY: Final = "_microusd"
_AMOUNT: Final = re.compile(r"Expected `int` (?:<=|>=|that's a multiple of) (\d+)")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`")
_MISSING: Final = re.compile(r"Object missing required field `(.*)`")
_WRONG_TYPE: Final = re.compile(r"Expected `(.+)`, got `(.+)`")


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The body as the decoder's type, or Invalid naming field and limit."""
    if not body:
        raise Invalid("body required", field="$")
    value, failure = _attempt(body, decoder)
    _check_text(body)
    if failure is not None:
        raise invalid(str(failure)) from failure
    assert value is not None
    return value


def _attempt(body: bytes, decoder: msgspec.json.Decoder[T]) -> tuple[T | None, msgspec.ValidationError | None]:
    try:
        return decoder.decode(body), None
    except msgspec.ValidationError as error:
        return None, error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _refuse_malformed(body, error)


def _check_text(body: bytes) -> None:
    """Refuse repeated keys and unsafe characters anywhere in the document; plain ASCII needs no walk."""
    try:
        document = json.loads(body, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        _refuse_malformed(body, error)
    if not (body.isascii() and b"\\u" not in body and b"\x7f" not in body):
        _walk(document)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise Invalid(f"duplicate key {key[:64]!a}", field=key[:64])
        found[key] = value
    return found


def _walk(document: object) -> None:
    pending: list[tuple[str, object]] = [("", document)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, str):
            _check_characters(path or "$", value)
        elif isinstance(value, dict):
            for key, inner in value.items():
                _check_characters(path or "$", key)
                pending.append((f"{path}.{key}" if path else key, inner))
        elif isinstance(value, list):
            pending.extend((f"{path}[{index}]", inner) for index, inner in enumerate(value))


def _check_characters(path: str, text: str) -> None:
    match = _UNSAFE.search(text)
    if match is None:
        return
    if "\ud800" <= match[0] <= "\udfff":
        raise Invalid(f"{path}: invalid unicode, half of a surrogate pair", field=path)
    raise Invalid(f"{path}: control characters are not allowed (U+{ord(match[0]):04X})", field=path)


def _refuse_malformed(body: bytes, error: Exception) -> NoReturn:
    """Say where the document stops being JSON; a lone surrogate is named as such."""
    if isinstance(error, RecursionError):
        raise Invalid("body is nested too deeply", field="$") from error
    try:
        _walk(json.loads(body.decode()))
    except UnicodeDecodeError as failure:
        raise Invalid(f"body is not valid UTF-8 at byte {failure.start}", field="$") from error
    except json.JSONDecodeError as failure:
        offset = len(failure.doc[: failure.pos].encode())
        raise Invalid(f"body is not valid JSON at byte {offset}", field="$") from error
    except (RecursionError, ValueError):
        raise Invalid("body is nested too deeply or holds too large a number", field="$") from error
    located = _BYTE.search(str(error))
    offset = int(located[1]) if located else len(body)
    raise Invalid(f"body is not valid JSON at byte {offset}", field="$") from error


def invalid(message: str, *, at: str = "") -> Invalid:
    """msgspec's message as an error for the sender; `at` where the message itself does not say."""
    located = _LOCATED.fullmatch(message)
    text, path = (located[1], located[2]) if located else (message, at)
    if match := _UNKNOWN.fullmatch(text):
        field = f"{path}.{match[1]}" if path else match[1]
        return Invalid(f"{field}: unknown or read-only field", field=field)
    if match := _MISSING.fullmatch(text):
        field = f"{path}.{match[1]}" if path else match[1]
        return Invalid(f"{field}: required", field=field)
    return Invalid(f"{path or 'body'}: {_phrase(text)}{_money(path, text)}", field=path or "$")


def _money(path: str, text: str) -> str:
    match = _AMOUNT.fullmatch(text) if path.endswith(_MONEY) else None
    return f" ({dollars(int(match[1]))})" if match else ""


def _phrase(text: str) -> str:
    for pattern, phrase in _PHRASES:
        if match := pattern.fullmatch(text):
            return phrase.format(*match.groups())
    if match := _WRONG_TYPE.fullmatch(text):
        wanted = " or ".join(_NAMES.get(name.strip(), name.strip()) for name in match[1].split("|"))
        return f"expected {wanted}, not {_NAMES.get(match[2], match[2]).removeprefix('an ').removeprefix('a ')}"
    return text[:1].lower() + text[1:]

"""Strict decoding of JSON bodies: what is wrong, and where, in words for the sender.

Beyond what the schema says, a body may not repeat a key, nor carry characters that break databases, logs or terminals
(control characters except tab and line ends, bidirectional overrides, halves of surrogate pairs).
"""

import re
from typing import Final, TypeVar

import msgspec

from penstock.kit import jsontext, parsing
from penstock.kit.errors import Invalid
from penstock.kit.text import dollars
from penstock.wire.unreadable import UNREADABLE

T = TypeVar("T")

_PLACE: Final = re.compile(r"(?:`key` in )?`\$\.?([^`]*)`")
_BYTE: Final = re.compile(r"(trailing characters )?\(byte (\d{1,18})\)$")
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
_UNKNOWN: Final = "Object contains unknown field `"
_MISSING: Final = "Object missing required field `"
#: So much of a name or value that we do not know is repeated.
_QUOTED_MAX: Final = 64
_TEXT_MAX: Final = 255
_WRONG_TYPE: Final = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_any_json: Final = msgspec.json.Decoder(msgspec.Raw)


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The body as the decoder's type, or Invalid naming field and limit."""
    _check_text(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(str(error)) from error
    except RecursionError as error:
        raise Invalid("body is nested too deeply", field="$") from error
    except UNREADABLE as error:
        raise _malformed(body, error) from error


async def read(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The same, off the event loop when the body is large."""
    return await parsing.parse(len(body), decode, body, decoder)


def _check_text(body: bytes) -> None:
    """Refuse what is no JSON, repeated keys and unsafe characters anywhere in the document."""
    if not body:
        raise Invalid("body required", field="$")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise Invalid(f"body is not valid UTF-8 at byte {error.start}", field="$") from error
    failure = _syntax(body)
    if isinstance(failure, RecursionError):
        raise Invalid("body is nested too deeply", field="$") from failure
    # Half of a surrogate pair is an error of syntax too, and named as what it is.
    jsontext.check(text)
    if failure is not None:
        raise _malformed(body, failure) from failure


def _syntax(body: bytes) -> Exception | None:
    try:
        _any_json.decode(body)
    except UNREADABLE as error:
        return error
    return None


def _malformed(body: bytes, error: Exception) -> Invalid:
    """Where the document stops being JSON."""
    located = _BYTE.search(str(error))
    offset = int(located[2]) if located else len(body)
    # What trails is counted from one.
    offset -= bool(located and located[1])
    return Invalid(f"body is not valid JSON at byte {offset}", field="$")


def invalid(message: str, *, at: str = "") -> Invalid:
    """msgspec's message as an error for the sender; `at` where the message itself does not say."""
    text, path = _located(message, at)
    for prefix, verdict in ((_UNKNOWN, "unknown or read-only field"), (_MISSING, "required")):
        if text.startswith(prefix):
            name = text[len(prefix) : -1][:_QUOTED_MAX]
            field = f"{path}.{name}" if path else name
            return Invalid(f"{field}: {verdict}", field=field)
    text = text[:_TEXT_MAX]
    return Invalid(f"{path or 'body'}: {_phrase(text)}{_money(path, text)}", field=path or "$")


def _located(message: str, at: str) -> tuple[str, str]:
    """The message and its place, which msgspec writes last: a name before it may look like one."""
    text, _, place = message.rpartition(" - at ")
    located = _PLACE.fullmatch(place) if text else None
    return (text, located[1]) if located else (message, at)


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

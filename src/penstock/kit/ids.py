"""Identifiers: a three-letter prefix that names the kind, then 26 characters that sort by time of making.

`prj_01k9z…`. The words `default` and `platform` stand for objects that every install has: what people use from the
start (`prj_default`), and what belongs to nobody but the install itself (`prj_platform`).
"""

import re
import secrets
import time
from typing import Final

from penstock.kit.errors import Invalid

_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_PATTERN: Final = re.compile(r"([a-z]{3})_(?:default|platform|[0-9a-hjkmnp-tv-z]{26})")


def new_id(prefix: str) -> str:
    """A fresh identifier: 48 bits of milliseconds and 80 random ones."""
    number = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    return f"{prefix}_" + "".join(_ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))


def is_id(prefix: str, text: str) -> bool:
    """Whether `text` has the shape of an identifier of this kind."""
    match = _PATTERN.fullmatch(text)
    return match is not None and match[1] == prefix


def made_s(text: str) -> float:
    """When an identifier of 26 characters was made, in seconds since 1970."""
    number = 0
    for character in text.partition("_")[2]:
        number = number << 5 | _ALPHABET.index(character)
    return (number >> 80) / 1000


def check_id(prefix: str, text: str, *, field: str) -> str:
    """`text` itself, or Invalid naming the field."""
    if not is_id(prefix, text):
        raise Invalid(f"{field} must look like {prefix}_ followed by 26 letters and digits", field=field)
    return text

"""Objects and their keys. Pure.

An object is a row that names a blob, which never changes: a new upload is a new blob, and the row moves over to it when
all of it is there. So a reader sees one object whole, and an upload that breaks off is seen by nobody.
"""

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from penstock.storage.errors import BadKey

KEY_CHARS_MAX: Final = 1024
CONTENT_TYPE_DEFAULT: Final = "application/octet-stream"
#: Keys sort below this character, so that it ends every range of them.
LAST: Final = "\U0010ffff"
#: Control characters of both sets, halves of surrogate pairs, what changes the writing direction, and `LAST`.
_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U0010ffff]")
_CONTENT_TYPE: Final = re.compile(r"[A-Za-z0-9!#$&^_.+-]{1,100}/[A-Za-z0-9!#$&^_.+-]{1,100}(; ?[\x21-\x7e ]{1,50})?")
_RANGE: Final = re.compile(r"bytes=(?P<first>[0-9]{0,18})-(?P<last>[0-9]{0,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Object:
    """One object as it is now."""

    project_id: str
    key: str
    blob_id: str
    size: int
    sha256: bytes
    content_type: str
    created_at: datetime
    created_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an installation sets for objects. `lease_s` is how long an upload may stand still before it is given up,
    `grace_s` how long a replaced blob stays for those who read it."""

    object_bytes_max: int = 5 << 30
    project_bytes_max: int = 100 << 30
    step_bytes: int = 16 << 20
    lease_s: float = 300.0
    grace_s: float = 3600.0
    uploads_max: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A page of a list: objects, and the common beginnings that stand for many of them. `after` is where the next page
    begins, empty on the last."""

    objects: list[Object]
    prefixes: list[str]
    after: str


def check_key(key: str) -> str:
    """The key itself, or BadKey saying what is wrong with it."""
    if not 1 <= len(key) <= KEY_CHARS_MAX:
        raise BadKey(f"key must have 1 to {KEY_CHARS_MAX} characters", field="key")
    if match := _UNSAFE.search(key):
        raise BadKey(f"key must not contain control characters (U+{ord(match[0]):04X})", field="key")
    if not {"", ".", ".."}.isdisjoint(key.split("/")):
        raise BadKey("key must not begin or end with a slash, nor have empty, . or .. segments", field="key")
    return key


def check_prefix(prefix: str) -> str:
    """The prefix itself; any beginning of a key is one."""
    if len(prefix) > KEY_CHARS_MAX or _UNSAFE.search(prefix):
        raise BadKey(f"prefix must have at most {KEY_CHARS_MAX} characters, none of them a control one", field="prefix")
    return prefix


def content_type(text: str) -> str | None:
    """What is kept of it; none when it is not one."""
    if not text:
        return CONTENT_TYPE_DEFAULT
    return text if _CONTENT_TYPE.fullmatch(text) else None


def parse_range(text: str, size: int) -> tuple[int, int] | None:
    """First byte and the one after the last, within the object; none where the header is to be ignored. An empty range
    means that it cannot be satisfied."""
    match = _RANGE.fullmatch(text.strip())
    if match is None or not (match["first"] or match["last"]):
        return None
    if not match["first"]:
        return max(0, size - int(match["last"])), size
    first = int(match["first"])
    last = int(match["last"]) if match["last"] else max(first, size)
    if last < first:
        return None
    return (first, min(last + 1, size)) if first < size else (size, size)

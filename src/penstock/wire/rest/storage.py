"""Objects, without their bytes: those are bodies by themselves."""

import msgspec

from penstock.wire.times import Time


class Object(msgspec.Struct, frozen=True, kw_only=True):
    """An object. `sha256` is in hexadecimal."""

    key: str
    size: int
    sha256: str
    content_type: str
    created_at: Time
    created_by: str


class ObjectPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of objects by key. With a delimiter, `prefixes` stand for everything that is below them."""

    items: list[Object]
    prefixes: list[str] = []
    next_cursor: str | None = None

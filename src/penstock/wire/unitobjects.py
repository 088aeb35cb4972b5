# ruff: noqa: N815 (names as in the messages beside it)
"""What a handler asks of its project's objects, and the answers: between framework, sidecar and gateway.

A handler has no key and no network. It asks by a frame of its answer (`Frame.object`), the sidecar asks the gateway
with the token of the attempt, and the answer comes back by `POST ANSWER_PATH`.
Bodies travel in base64, in bounded parts.
"""

from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

#: One part of an object, as it is read or written.
READ_BYTES_MAX: Final = 4 << 20
WRITE_BYTES_MAX: Final = 1 << 20
PAGE_MAX: Final = 1000
#: Below an attempt's path at the gateway, and how the object is described beside its bytes.
OBJECTS_PATH: Final = "objects"
SIZE_HEADER: Final = "Penstock-Object-Size"
SHA256_HEADER: Final = "Penstock-Object-SHA256"
TYPE_HEADER: Final = "Penstock-Object-Type"
_BASE64_CHARS_MAX: Final = WRITE_BYTES_MAX // 3 * 4 + 8
_Id: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]
_Text: TypeAlias = Annotated[str, Meta(max_length=1100)]
_Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 50)]


class ObjectEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An object without its bytes."""

    key: str
    size: int
    sha256: str
    contentType: str


class ObjectPage(msgspec.Struct, frozen=True, kw_only=True):
    """Objects by key. `after` is where the next page begins, empty on the last."""

    objects: list[ObjectEntry]
    after: str


class ObjectAsk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One question. `read` gives up to `length` bytes from `offset`, of the object with this `sha256` if one is named.
    `write` gives the next part of an `upload`, which the `last` one completes; `abort` gives it up."""

    call: _Id
    op: Literal["read", "write", "abort", "list", "delete"]
    key: _Text = ""
    offset: _Count = 0
    length: Annotated[int, Meta(ge=0, le=READ_BYTES_MAX)] = 0
    sha256: Annotated[str, Meta(max_length=64)] = ""
    upload: Annotated[str, Meta(max_length=64)] = ""
    contentType: Annotated[str, Meta(max_length=255)] = "application/octet-stream"
    onlyNew: bool = False
    data: Annotated[str, Meta(max_length=_BASE64_CHARS_MAX)] = ""
    last: bool = False
    prefix: _Text = ""
    after: _Text = ""


class ObjectAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to a question. `code` is empty when all went well; else `error` says it in words."""

    call: str
    code: str = ""
    error: str = ""
    data: str = ""
    entry: ObjectEntry | None = None
    page: ObjectPage | None = None

"""Pages of lists: which one is asked for, and the cursor that names the next."""

import base64
import hashlib
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.kit.errors import Invalid
from penstock.wire.unreadable import UNREADABLE

LIMIT_MAX: Final = 200
LIMIT_DEFAULT: Final = 50
CURSOR_BYTES_MAX: Final = 1024

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class PageQuery:
    """Which page of a list is asked for."""

    limit: int = LIMIT_DEFAULT
    cursor: str | None = None


def encode_cursor(*parts: str | int) -> str:
    """An opaque cursor. The checksum finds damage; it grants nothing, every query carries the project anyway."""
    payload = _encoder.encode(parts)
    return base64.urlsafe_b64encode(_checksum(payload) + payload).rstrip(b"=").decode()


def decode_cursor(text: str) -> list[str | int]:
    """What `encode_cursor` was given, or Invalid."""
    try:
        if len(text) > CURSOR_BYTES_MAX:
            raise ValueError
        raw = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
        parts = msgspec.json.decode(raw[8:], type=list[str | int])
    except (ValueError, *UNREADABLE) as error:
        raise Invalid("invalid cursor", field="cursor") from error
    if encode_cursor(*parts) != text or not all(map(_storable, parts)):
        raise Invalid("invalid cursor", field="cursor")
    return parts


def _storable(part: str | int) -> bool:
    """Whether a query can take it: anyone can make a cursor, and none may break a statement."""
    return "\0" not in part if isinstance(part, str) else abs(part) < 1 << 63


def _checksum(payload: bytes) -> bytes:
    return hashlib.sha256(b"penstock cursor\0" + payload).digest()[:8]

"""Errors of a decoder that was given bytes from outside. msgspec raises all three: bytes that are no UTF-8 and values
that are nested too deeply have errors of their own."""

from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

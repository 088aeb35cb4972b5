"""Foreign text made safe to show: no character of it can steer a terminal, a spreadsheet or the reader's eye."""

import re
from datetime import UTC, datetime
from typing import Final

from penstock.cli.errors import CliError

#: Control characters of both sets, line and paragraph separators, and everything that changes the writing direction.
_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
#: The same inside JSON, where line breaks stand between values.
_UNSAFE_JSON: Final = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def clean(text: str) -> str:
    """`text` with unsafe characters spelt out."""
    return _UNSAFE.sub(_spelt, text)


def _spelt(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def clean_json(text: str) -> str:
    """JSON with the same meaning and without unsafe characters."""
    return _UNSAFE_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def csv_cell(text: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    return clean("'" + text if text.startswith(_FORMULA) else text)


def cell(value: object) -> str:
    """A value as people read it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    if isinstance(value, dict):
        return " ".join(f"{key}={cell(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return " ".join(cell(item) for item in value)
    return str(value)


def dollars(microusd: int) -> str:
    """Money, exact to the micro-dollar."""
    whole, rest = divmod(microusd, 1_000_000)
    cents = f"{rest:06d}".rstrip("0")
    return f"${whole}.{cents:0<2}"


def size(count: int) -> str:
    """Bytes in a unit of which there are few."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"


def seconds(text: str, *, field: str) -> int:
    """A time such as 90s, 30m, 2h or 1d."""
    found = re.fullmatch(r"(\d{1,9})([smhd])", text.strip())
    if found is None:
        raise CliError(f"{field} must be a number and s, m, h or d, such as 30m, not {clean(text)[:40]!r}", field=field)
    return int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]

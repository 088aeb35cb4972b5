"""How what we send to others proves where it comes from. Pure.

`Penstock-Signature: t=<unix seconds>,v1=<hex>`: HMAC-SHA256, keyed with the secret's text, of `<t>.` and the body as it
is on the wire. While a secret is being exchanged there are two `v1`; one that fits is enough. The time is signed, so an
old message cannot be sent again as a new one.
"""

import hmac
import re
from collections.abc import Iterable
from typing import Final

HEADER: Final = "Penstock-Signature"
EVENT_ID_HEADER: Final = "Penstock-Event-Id"
TOLERANCE_S: Final = 300
_HEADER: Final = re.compile(r"t=(\d{1,12})((?:,v1=[0-9a-f]{64}){1,8})")


def sign(body: bytes, secrets: Iterable[str], *, at: int) -> str:
    """The header's value for a body that is sent now."""
    return ",".join((f"t={at}", *(f"v1={_digest(body, secret, at)}" for secret in secrets)))


def verify(body: bytes, header: str, secret: str, *, now: float, tolerance_s: float = TOLERANCE_S) -> bool:
    """Whether somebody who knows the secret sent exactly this, lately."""
    match = _HEADER.fullmatch(header)
    if match is None or abs(now - int(match[1])) > tolerance_s:
        return False
    expected = _digest(body, secret, int(match[1]))
    given = match[2].removeprefix(",v1=").split(",v1=")
    return any(hmac.compare_digest(expected, each) for each in given)


def _digest(body: bytes, secret: str, at: int) -> str:
    return hmac.digest(secret.encode(), b"%d." % at + body, "sha256").hex()

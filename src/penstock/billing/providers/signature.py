"""Whether a webhook's very bytes were signed with our secret, just now.

Stripe's own library compares; what it lets pass is refused here before: times ahead of ours, times that are no plain
number, headers that it cannot read. During a rotation the secret of before counts until a time that the operator sets.
The library takes its time to import, so that happens with the first signature.
"""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from penstock.billing.errors import BadSignature

HEADER: Final = "Stripe-Signature"
TOLERANCE_S: Final = 300
_HEADER_CHARS_MAX: Final = 4096
_PRINTABLE: Final = re.compile(r"[\x21-\x7e ]+")
_SECONDS: Final = re.compile(r"[0-9]{1,12}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """What signatures are made with."""

    current: str
    previous: str = ""
    previous_until: datetime | None = None

    def accepted(self, now: float) -> Iterator[str]:
        """Those that count at this time."""
        yield self.current
        if self.previous and self.previous_until is not None and now < self.previous_until.timestamp():
            yield self.previous


def verify(body: bytes, header: str, secrets: Secrets, *, clock: Callable[[], float] = time.time) -> None:
    """Pass, or BadSignature."""
    now = clock()
    sent_at = _timestamp(header)
    if not any(_matches(body, header, secret) for secret in secrets.accepted(now)):
        raise BadSignature(f"{HEADER} does not match the body", field=HEADER)
    if abs(now - sent_at) > TOLERANCE_S:
        raise BadSignature(f"{HEADER}: timestamp outside the tolerance of {TOLERANCE_S} s", field=HEADER)


def sign(body: bytes, secret: str, *, at: float) -> str:
    """The header for a body."""
    from stripe import WebhookSignature

    return WebhookSignature.generate_signature_header(body.decode(), secret, timestamp=int(at))


def _timestamp(header: str) -> int:
    if not header:
        raise BadSignature(f"{HEADER} is missing", field=HEADER)
    if len(header) > _HEADER_CHARS_MAX or not _PRINTABLE.fullmatch(header):
        raise BadSignature(f"{HEADER} must be at most {_HEADER_CHARS_MAX} printable characters", field=HEADER)
    times = [part[2:] for part in header.split(",") if part.startswith("t=")]
    if len(times) != 1 or not _SECONDS.fullmatch(times[0]):
        raise BadSignature(f"{HEADER}: t must come once and be a number of seconds", field=HEADER)
    return int(times[0])


def _matches(body: bytes, header: str, secret: str) -> bool:
    from stripe import SignatureVerificationError, WebhookSignature

    try:
        return WebhookSignature.verify_header(body, header, secret)
    except (SignatureVerificationError, UnicodeDecodeError):
        return False

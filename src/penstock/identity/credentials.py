"""What secrets of keys and sessions look like, and what is kept of them."""

import hashlib
from typing import Final

KEY_PREFIX: Final = "psk_"
SESSION_PREFIX: Final = "pss_"


def digest(secret: str) -> bytes:
    """What is stored of a key or a session."""
    return hashlib.sha256(secret.encode()).digest()

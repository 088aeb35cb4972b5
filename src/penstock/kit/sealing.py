"""Secrets that are answered once and yet must be repeatable under an Idempotency-Key.

The kept answer holds the secret only sealed under the caller's own credential, which is not stored anywhere: neither
the database nor another credential opens it.
"""

import base64
import hashlib
import os
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NONCE_BYTES: Final = 12


def seal(secret: str, *, credential: str) -> str:
    """The secret, readable only with the same credential."""
    nonce = os.urandom(_NONCE_BYTES)
    return base64.urlsafe_b64encode(nonce + _cipher(credential).encrypt(nonce, secret.encode(), None)).decode()


def unseal(sealed: str, *, credential: str) -> str | None:
    """The secret, or none if it was sealed under another credential."""
    raw = base64.urlsafe_b64decode(sealed)
    try:
        return _cipher(credential).decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], None).decode()
    except InvalidTag:
        return None


def _cipher(credential: str) -> AESGCM:
    return AESGCM(hashlib.sha256(b"penstock sealing\0" + credential.encode()).digest())

"""NATS's keys and tokens: Ed25519 keys in base32 with a checksum, and JSON web tokens signed by them.

Only what an auth callout needs, on `cryptography`, which signs our certificates too. A token counts only when it was
signed by the key that it names as its issuer; whether that issuer may say so is the caller's question.
"""

import base64
import binascii
import hashlib
import os
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from penstock.kit.errors import Invalid
from penstock.wire.unreadable import UNREADABLE

#: What stands before a key says what it is; an account's seed begins with SA, its public key with A.
_SEED_OF_ACCOUNT: Final = bytes([18 << 3, 0])
_ACCOUNT: Final = bytes([0])
_HEADER: Final = {"typ": "JWT", "alg": "ed25519-nkey"}
_KEY_BYTES: Final = 32


class Issuer:
    """An account's key pair: what it signs, the server believes."""

    def __init__(self, seed: str) -> None:
        raw = _decode(seed)
        if len(raw) != 2 + _KEY_BYTES or not raw.startswith(_SEED_OF_ACCOUNT):
            raise Invalid("this is not the seed of an account: it begins with SA and has 58 characters", field="seed")
        self._key = Ed25519PrivateKey.from_private_bytes(raw[2:])
        self.public = _encode(_ACCOUNT, _raw_public(self._key))

    def sign(self, claims: Mapping[str, Any]) -> str:
        """A token with these claims, from this issuer; its id is their hash."""
        said = {**claims, "iss": self.public}
        said["jti"] = base64.b32encode(hashlib.sha256(msgspec.json.encode(said)).digest()).decode().rstrip("=")
        head = f"{_part(_HEADER)}.{_part(said)}"
        return f"{head}.{_base64(self._key.sign(head.encode()))}"


def new_account_seed() -> str:
    """The seed of a fresh account key."""
    return _encode(_SEED_OF_ACCOUNT, os.urandom(_KEY_BYTES))


def read(token: bytes) -> dict[str, Any]:
    """The claims of a token whose issuer really signed it."""
    try:
        head, claims, signature = token.split(b".")
        said = msgspec.json.decode(_unbase64(claims), type=dict[str, Any])
        key = Ed25519PublicKey.from_public_bytes(_decode(str(said["iss"]))[1:])
        key.verify(_unbase64(signature), head + b"." + claims)
    except (ValueError, KeyError, InvalidSignature, *UNREADABLE) as error:
        raise Invalid("the token is not one, or is not signed by its issuer") from error
    return said


def _raw_public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


def _encode(prefix: bytes, key: bytes) -> str:
    body = prefix + key
    return base64.b32encode(body + binascii.crc_hqx(body, 0).to_bytes(2, "little")).decode().rstrip("=")


def _decode(text: str) -> bytes:
    """Prefix and key; the checksum has to fit."""
    try:
        raw = base64.b32decode(text + "=" * (-len(text) % 8))
    except ValueError as error:
        raise Invalid("this is no NATS key", field="seed") from error
    body, checksum = raw[:-2], raw[-2:]
    if len(body) <= _KEY_BYTES or binascii.crc_hqx(body, 0).to_bytes(2, "little") != checksum:
        raise Invalid("this is no NATS key: its checksum is wrong", field="seed")
    return body


def _part(value: Mapping[str, Any]) -> str:
    return _base64(msgspec.json.encode(value))


def _base64(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")


def _unbase64(value: bytes) -> bytes:
    return base64.urlsafe_b64decode(value + b"=" * (-len(value) % 4))

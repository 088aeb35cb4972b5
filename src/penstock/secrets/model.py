"""Secrets as people see them, and the envelope that keeps their values. Pure.

Each version has a data key of its own, which encrypts the value; a master key encrypts the data key. Both are bound to
project, name and version, so that a row which somebody moves or exchanges does not open.
"""

import os
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from penstock.secrets.errors import Tampered

VALUE_BYTES_MAX: Final = 64 << 10
#: Of one unit, together: they travel to the node in one frame.
UNIT_BYTES_MAX: Final = 1 << 20
SECRETS_MAX: Final = 1000
#: Of one secret that are kept at a time; old ones go by themselves.
VERSIONS_MAX: Final = 100
KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One value that a secret has or had."""

    version: int
    created_at: datetime
    created_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """A name and its current version; the value is nowhere in it."""

    name: str
    version: int
    created_at: datetime
    created_by: str
    updated_at: datetime
    updated_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What a unit's limits need to know of a value. One that `fits_env` holds no NUL."""

    name: str
    version: int
    bytes: int
    fits_env: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which value it is; part of what is authenticated."""

    project_id: str
    name: str
    version: int

    @property
    def bound(self) -> bytes:
        """The same as bytes. No part can hold a NUL, so no two places look alike."""
        return b"\0".join((b"penstock secret 1", self.project_id.encode(), self.name.encode(), b"%d" % self.version))


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterKey:
    """A key that wraps data keys."""

    id: str
    raw: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A value as it is stored."""

    sealed: bytes
    wrapped_key: bytes
    key_id: str


def seal(place: Place, value: bytes, master: MasterKey) -> Envelope:
    """The value under a new data key."""
    data_key = os.urandom(KEY_BYTES)
    return Envelope(
        sealed=_encrypt(data_key, value, place.bound),
        wrapped_key=_encrypt(master.raw, data_key, _wrapping(place, master)),
        key_id=master.id,
    )


def unseal(place: Place, envelope: Envelope, master: MasterKey) -> bytes:
    """The value, or Tampered."""
    return _decrypt(_data_key(place, envelope, master), envelope.sealed, place)


def rewrap(place: Place, envelope: Envelope, old: MasterKey, new: MasterKey) -> Envelope:
    """The same value and data key, under another master key."""
    data_key = _data_key(place, envelope, old)
    return Envelope(
        sealed=envelope.sealed, wrapped_key=_encrypt(new.raw, data_key, _wrapping(place, new)), key_id=new.id
    )


def _data_key(place: Place, envelope: Envelope, master: MasterKey) -> bytes:
    return _decrypt(master.raw, envelope.wrapped_key, place, bound=_wrapping(place, master))


def _wrapping(place: Place, master: MasterKey) -> bytes:
    return place.bound + b"\0" + master.id.encode()


def _encrypt(key: bytes, content: bytes, bound: bytes) -> bytes:
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, content, bound)


def _decrypt(key: bytes, content: bytes, place: Place, *, bound: bytes | None = None) -> bytes:
    try:
        return AESGCM(key).decrypt(content[:_NONCE_BYTES], content[_NONCE_BYTES:], bound or place.bound)
    except (InvalidTag, ValueError):
        # The name stays out of what the caller sees: this is for whoever looks after the install.
        raise Tampered(
            "a secret cannot be opened: what is stored was changed", project_id=place.project_id, version=place.version
        ) from None

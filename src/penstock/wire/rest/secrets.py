"""Secrets: written, never read."""

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.wire.rest.common import Body
from penstock.wire.times import Time


class SecretPut(Body, frozen=True):
    """Set a secret, as text or, for any bytes at all, in base64; at most 64 KiB."""

    value: Annotated[str, Meta(max_length=64 << 10)] | None = None
    value_base64: Annotated[str, Meta(max_length=88 << 10)] | None = None


class SecretVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A value that the secret has or had."""

    version: int
    created_at: Time
    created_by: str


class Secret(msgspec.Struct, frozen=True, kw_only=True):
    """A secret without its value. `version` is the one that new units get; `versions` are those that are kept, shown
    for one secret only."""

    name: str
    version: int
    created_at: Time
    created_by: str
    updated_at: Time
    updated_by: str
    versions: list[SecretVersion] = []

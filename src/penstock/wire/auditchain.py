"""How audit rows are linked: each hash covers its row and the hash before it, so an edited, removed or inserted row
breaks the chain from there on. Pure, so that whoever holds an export can verify it without the server."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC
from typing import Final

import msgspec

from penstock.wire.rest import AuditEntry, ChainedAudit

#: The chain of rows that belong to no organisation.
PLATFORM: Final = "platform"
#: What the first row of every chain is linked to.
GENESIS: Final = bytes(32)
_encoder = msgspec.json.Encoder(order="deterministic")


def chain_of(organisation_id: str | None) -> str:
    """The chain that a row belongs to."""
    return organisation_id or PLATFORM


def link(previous: bytes, entry: AuditEntry) -> bytes:
    """The hash of `entry` after `previous`."""
    content = (
        entry.id,
        entry.at.astimezone(UTC).isoformat(timespec="microseconds"),
        entry.actor_id,
        entry.actor_kind,
        entry.action,
        entry.target_id,
        entry.organisation_id,
        entry.project_id,
        entry.correlation_id,
        entry.detail,
    )
    return hashlib.sha256(previous + hashlib.sha256(_encoder.encode(content)).digest()).digest()


@dataclass(frozen=True, slots=True)
class Broken:
    """Where a chain does not hold, and why."""

    position: int
    why: str


@dataclass(frozen=True, slots=True)
class Head:
    """The end of a chain that holds."""

    position: int = 0
    hash: bytes = GENESIS


def verify(links: Iterable[ChainedAudit], anchor: Head | None = None) -> Head | Broken:
    """Follow a chain from its beginning. `anchor` is a place that was once seen to hold: the chain must pass it."""
    head = Head()
    passed = anchor is None or anchor.position == 0
    for found in links:
        if found.position != head.position + 1:
            return Broken(head.position + 1, "a link is missing")
        if found.entry is None:
            return Broken(found.position, f"the row {found.audit_id} is gone")
        expected = link(head.hash, found.entry)
        if expected.hex() != found.hash:
            return Broken(found.position, f"the row {found.audit_id} or its link was changed")
        head = Head(found.position, expected)
        if anchor is not None and anchor.position == head.position:
            if anchor.hash != head.hash:
                return Broken(head.position, "the chain was written anew since the anchor was kept")
            passed = True
    return head if passed else Broken(head.position + 1, "the end that the anchor knows is gone")

"""Asking for the end of what cannot be paid for. The flow that releases takes one request at a time.

A request stands once it is made: money that comes later gives nothing back to life and spares nothing.
"""

from collections.abc import Mapping
from typing import Any

from penstock.billing.model import FORCE_RELEASE_FACT
from penstock.billing.store import releases
from penstock.billing.store.releases import ReleaseRequest
from penstock.kit.db import Tx
from penstock.kit.outbox import Event
from penstock.wire import subjects

__all__ = ["ReleaseRequest", "finish", "is_asked", "request", "take"]


async def request(
    tx: Tx,
    *,
    organisation_id: str,
    reason: str,
    aggregate_id: str,
    version: int,
    project_id: str | None = None,
    key_id: str | None = None,
) -> Event:
    """Ask for it; the fact that says so, for the caller to write as its aggregate's next."""
    await releases.request(tx, organisation_id=organisation_id, project_id=project_id, key_id=key_id, reason=reason)
    tx.hint(subjects.RELEASES)
    payload: Mapping[str, Any] = {
        "organisation_id": organisation_id,
        "project_id": project_id,
        "key_id": key_id,
        "reason": reason,
    }
    return Event(
        type=FORCE_RELEASE_FACT,
        aggregate_id=aggregate_id,
        version=version,
        organisation_id=organisation_id,
        project_id=project_id,
        payload=payload,
    )


async def is_asked(tx: Tx, organisation_id: str) -> bool:
    """Whether all of an organisation's allocations have to go already."""
    return await releases.is_open(tx, organisation_id)


async def take(tx: Tx) -> ReleaseRequest | None:
    """The oldest open request, for this transaction to carry out."""
    return await releases.take(tx)


async def finish(tx: Tx, done: ReleaseRequest) -> None:
    """It is carried out."""
    await releases.finish(tx, done.id)

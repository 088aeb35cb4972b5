"""Requests to give back what runs."""

from dataclasses import dataclass
from datetime import datetime

from penstock.kit.db import Tx
from penstock.kit.telemetry import correlation_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRequest:
    """Whose allocations have to go: of the organisation, or only of a project or a key of it."""

    id: int
    organisation_id: str
    project_id: str | None
    key_id: str | None
    reason: str
    correlation_id: str
    requested_at: datetime


async def request(
    tx: Tx, *, organisation_id: str, reason: str, project_id: str | None = None, key_id: str | None = None
) -> None:
    """Ask for it."""
    await tx.execute(
        "insert into billing.release_requests (organisation_id, project_id, key_id, reason, correlation_id)"
        " values ($1, $2, $3, $4, $5)",
        organisation_id,
        project_id,
        key_id,
        reason,
        correlation_id(),
    )


async def is_open(tx: Tx, organisation_id: str) -> bool:
    """Whether there is a request for the whole organisation that is not carried out yet."""
    return await tx.fetchval(
        "select exists (select 1 from billing.release_requests"
        " where organisation_id = $1 and project_id is null and done_at is null)",
        organisation_id,
    )


async def take(tx: Tx) -> ReleaseRequest | None:
    """The oldest that is open and in nobody's hands, locked."""
    row = await tx.fetchrow(
        "select id, organisation_id, project_id, key_id, reason, correlation_id, requested_at"
        " from billing.release_requests where done_at is null order by id limit 1 for update skip locked"
    )
    return ReleaseRequest(**dict(row)) if row else None


async def finish(tx: Tx, request_id: int) -> None:
    """Everything it names is on its way out."""
    await tx.execute("update billing.release_requests set done_at = clock_timestamp() where id = $1", request_id)

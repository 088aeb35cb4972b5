"""Who did what, written in the transaction that did it. Rows are only ever inserted."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.kit.db import Tx
from penstock.kit.ids import new_id
from penstock.kit.telemetry import correlation_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """On whose behalf: a principal of identity, a node, or a part of the system."""

    id: str
    kind: str
    organisation_id: str | None = None
    project_id: str | None = None


def system(name: str) -> Actor:
    """A part of Penstock itself, such as `system:reconciler`."""
    return Actor(id=f"system:{name}", kind="system")


async def record(
    tx: Tx,
    actor: Actor,
    action: str,
    target_id: str,
    *,
    organisation_id: str | None = None,
    project_id: str | None = None,
    detail: Mapping[str, Any] | None = None,
) -> None:
    """Add one audit row; the owner of the target defaults to the actor's own organisation and project."""
    await tx.execute(
        "insert into kit.audit (id, actor_id, actor_kind, action, target_id, organisation_id, project_id,"
        " correlation_id, detail) values ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        new_id("aud"),
        actor.id,
        actor.kind,
        action,
        target_id,
        organisation_id or actor.organisation_id,
        project_id or actor.project_id,
        correlation_id(),
        dict(detail or {}),
    )

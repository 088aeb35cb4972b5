"""The rows of webhooks and their secrets. Only `move` writes a webhook's state: it compares the version and leaves the
fact in the outbox."""

from collections.abc import Sequence
from typing import Any, Final

from penstock.kit import outbox
from penstock.kit.db import Reader, Row, Tx
from penstock.kit.errors import StaleRow
from penstock.kit.ids import new_id
from penstock.kit.outbox import Event
from penstock.kit.telemetry import correlation_id
from penstock.notices.errors import IllegalMove
from penstock.notices.model import FACTS, MOVES, Sealed, Webhook, WebhookEvent, WebhookState

_COLUMNS: Final = (
    "w.id, w.organisation_id, w.project_id, w.url, w.event_types, w.state, w.reason, w.version, w.failures,"
    " w.failing_since, w.created_at, w.created_by, w.updated_at,"
    " case when w.state = 'active' and w.failures > 0 then w.quiet_until end as next_try_at,"
    " (select max(s.expires_at) from notices.secrets s where s.webhook_id = w.id"
    " and s.expires_at > clock_timestamp()) as old_secret_until"
)
_MOVE: Final = f"""
with moved as (
    update notices.webhooks w
       set state = $3, reason = $4, version = version + 1, updated_at = clock_timestamp(),
           since = case when $3 = 'active' then pg_current_xact_id() else since end,
           failures = case when $3 = 'active' then 0 else failures end,
           failing_since = case when $3 = 'active' then null else failing_since end,
           quiet_until = case when $3 = 'active' then '-infinity' else quiet_until end
     where id = $1 and version = $2
    returning {_COLUMNS}
), fact as (
    insert into kit.outbox ({outbox.COLUMNS})
    select $5, $6, id, version, organisation_id, project_id, $7, $8 from moved
)
select * from moved
"""  # noqa: S608


async def lock_project(tx: Tx, project_id: str) -> None:
    """Makers of one project take turns: its webhooks are counted."""
    await tx.execute("select pg_advisory_xact_lock(hashtextextended($1, 12))", f"webhooks {project_id}")


async def count(conn: Reader, project_id: str) -> int:
    """How many webhooks the project has."""
    return await conn.fetchval(
        "select count(*) from notices.webhooks where project_id = $1 and state <> 'deleted'", project_id
    )


async def insert(
    tx: Tx,
    *,
    organisation_id: str,
    project_id: str,
    url: str,
    event_types: Sequence[str],
    sees_billing: bool,
    created_by: str,
) -> Webhook:
    """A new webhook, active."""
    row = await tx.fetchrow(
        "insert into notices.webhooks as w (id, organisation_id, project_id, url, event_types, sees_billing, state,"  # noqa: S608
        f" created_by) values ($1, $2, $3, $4, $5, $6, 'active', $7) returning {_COLUMNS}",
        new_id("whk"),
        organisation_id,
        project_id,
        url,
        event_types,
        sees_billing,
        created_by,
    )
    assert row is not None
    return _webhook(row)


async def find(conn: Reader, project_id: str, webhook_id: str, *, lock: bool = False) -> Webhook | None:
    """One webhook of the project."""
    row = await conn.fetchrow(
        f"select {_COLUMNS} from notices.webhooks w where id = $1 and project_id = $2 and state <> 'deleted'"  # noqa: S608
        + (" for update" if lock else ""),
        webhook_id,
        project_id,
    )
    return _webhook(row) if row else None


async def page(conn: Reader, project_id: str, *, after: str, limit: int) -> list[Webhook]:
    """The project's webhooks, oldest first."""
    rows = await conn.fetch(
        f"select {_COLUMNS} from notices.webhooks w"  # noqa: S608
        " where project_id = $1 and id > $2 and state <> 'deleted' order by id limit $3",
        project_id,
        after,
        limit,
    )
    return [_webhook(row) for row in rows]


async def change(
    tx: Tx, webhook: Webhook, *, url: str, event_types: Sequence[str], sees_billing: bool | None
) -> Webhook:
    """Another address or other events; a new address starts without the failures of the old one."""
    row = await tx.fetchrow(
        "update notices.webhooks w set url = $3, event_types = $4, sees_billing = coalesce($5, sees_billing),"  # noqa: S608
        " version = version + 1, updated_at = clock_timestamp(),"
        " failures = case when url = $3 then failures else 0 end,"
        " failing_since = case when url = $3 then failing_since end,"
        " quiet_until = case when url = $3 then quiet_until else '-infinity' end"
        f" where id = $1 and version = $2 returning {_COLUMNS}",
        webhook.id,
        webhook.version,
        url,
        event_types,
        sees_billing,
    )
    if row is None:
        raise _stale(webhook)
    return _webhook(row)


async def move(tx: Tx, webhook: Webhook, event: WebhookEvent, reason: str) -> Webhook:
    """Apply the event to the row as it was read, with its fact; StaleRow when another writer was first."""
    target = MOVES.get((webhook.state, event))
    if target is None:
        raise IllegalMove(f"a webhook that is {webhook.state} cannot {event}", webhook_id=webhook.id)
    fact = {**webhook.fact, "state": str(target), "reason": reason}
    row = await tx.fetchrow(
        _MOVE,
        webhook.id,
        webhook.version,
        target,
        reason,
        new_id("evt"),
        FACTS[event],
        correlation_id(),
        fact,
    )
    if row is None:
        raise _stale(webhook)
    outbox.wake(tx)
    return _webhook(row)


async def tell(tx: Tx, webhook: Webhook, event_type: str) -> None:
    """A fact about it that is not a move."""
    await outbox.append(
        tx,
        Event(
            type=event_type,
            aggregate_id=webhook.id,
            version=webhook.version,
            organisation_id=webhook.organisation_id,
            project_id=webhook.project_id,
            payload=webhook.fact,
        ),
    )


async def lock_active(tx: Tx, *, project_ids: Sequence[str]) -> list[Webhook]:
    """Those of these projects that events are sent to, locked."""
    rows = await tx.fetch(
        f"select {_COLUMNS} from notices.webhooks w where project_id = any($1) and state = 'active' for update",  # noqa: S608
        project_ids,
    )
    return [_webhook(row) for row in rows]


async def lock_overfull(tx: Tx, *, pending_max: int) -> list[Webhook]:
    """Active ones that more events wait for than may, locked."""
    rows = await tx.fetch(
        f"select {_COLUMNS} from notices.webhooks w where state = 'active' and id in (select webhook_id"  # noqa: S608
        " from notices.deliveries where state = 'pending' group by webhook_id having count(*) > $1)"
        " for update skip locked",
        pending_max,
    )
    return [_webhook(row) for row in rows]


async def hurry(tx: Tx, webhook_id: str) -> None:
    """Send to it at once, whatever failed before."""
    await tx.execute("update notices.webhooks set quiet_until = '-infinity' where id = $1", webhook_id)


async def next_secret_version(conn: Reader, webhook_id: str) -> int:
    """The version that a new secret gets."""
    return await conn.fetchval(
        "select coalesce(max(version), 0) + 1 from notices.secrets where webhook_id = $1", webhook_id
    )


async def put_secret(tx: Tx, webhook_id: str, secret: Sealed, *, old_for_s: float) -> None:
    """A new current secret. The one before it goes on for a while, those before that end at once."""
    await tx.execute(
        "delete from notices.secrets where webhook_id = $1 and expires_at is not null",
        webhook_id,
    )
    await tx.execute(
        "update notices.secrets set expires_at = clock_timestamp() + make_interval(secs => $2) where webhook_id = $1",
        webhook_id,
        old_for_s,
    )
    await tx.execute(
        "insert into notices.secrets (webhook_id, version, key_id, sealed) values ($1, $2, $3, $4)",
        webhook_id,
        secret.version,
        secret.key_id,
        secret.content,
    )


async def secrets_under_others(tx: Tx, key_id: str, *, limit: int) -> list[tuple[str, str, Sealed]]:
    """Secrets under another master key, locked; with their project and webhook."""
    rows = await tx.fetch(
        "select w.project_id, s.webhook_id, s.version, s.key_id, s.sealed from notices.secrets s"
        " join notices.webhooks w on w.id = s.webhook_id where s.key_id <> $1 limit $2 for update of s skip locked",
        key_id,
        limit,
    )
    return [
        (row["project_id"], row["webhook_id"], Sealed(row["version"], row["key_id"], row["sealed"])) for row in rows
    ]


async def replace_secrets(tx: Tx, secrets: Sequence[tuple[str, Sealed]]) -> None:
    """The same secrets under another master key."""
    await tx.executemany(
        "update notices.secrets set key_id = $3, sealed = $4 where webhook_id = $1 and version = $2",
        [(webhook_id, secret.version, secret.key_id, secret.content) for webhook_id, secret in secrets],
    )


async def count_secrets_by_key(conn: Reader) -> dict[str, int]:
    """How many secrets each master key opens."""
    rows = await conn.fetch("select key_id, count(*) as count from notices.secrets group by key_id")
    return {row["key_id"]: row["count"] for row in rows}


def _stale(webhook: Webhook) -> StaleRow:
    return StaleRow("the webhook was changed at the same moment; try again", webhook_id=webhook.id)


def _webhook(row: Row) -> Webhook:
    values: dict[str, Any] = dict(row)
    values["state"] = WebhookState(row["state"])
    return Webhook(**values)

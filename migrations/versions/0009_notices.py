"""Outgoing webhooks, their secrets, and what is delivered to them."""

from alembic import op

revision = "0009"
down_revision = "0008"

STATEMENTS = (
    "create schema notices",
    # A webhook hears of what was committed by transactions after `since`; `failures` are those in a row, and until
    # `quiet_until` nothing is sent to it.
    """
    create table notices.webhooks (
        id text primary key,
        organisation_id text not null,
        project_id text not null,
        url text not null,
        event_types text[] not null,
        sees_billing boolean not null,
        state text not null check (state in ('active', 'paused', 'deleted')),
        reason text not null default '',
        version bigint not null default 1,
        since xid8 not null default pg_current_xact_id(),
        failures int not null default 0,
        failing_since timestamptz,
        quiet_until timestamptz not null default '-infinity',
        created_at timestamptz not null default clock_timestamp(),
        created_by text not null,
        updated_at timestamptz not null default clock_timestamp()
    )
    """,
    "create index webhooks_project on notices.webhooks (project_id, id) where state <> 'deleted'",
    "create index webhooks_listening on notices.webhooks (since) where state = 'active'",
    "create index webhooks_of_project on notices.webhooks (project_id) where state = 'active'",
    "create index webhooks_of_organisation on notices.webhooks (organisation_id) where state = 'active'",
    "create index webhooks_deleted on notices.webhooks (id) where state = 'deleted'",
    # The current secret has no end; the one before it has.
    """
    create table notices.secrets (
        webhook_id text not null references notices.webhooks on delete cascade,
        version int not null,
        key_id text not null,
        sealed bytea not null,
        expires_at timestamptz,
        primary key (webhook_id, version)
    )
    """,
    "create index secrets_key on notices.secrets (key_id)",
    # The event is copied: what is owed outlives the log's own retention. `seq` is the order of the feed.
    """
    create table notices.deliveries (
        seq bigint generated always as identity,
        id text primary key,
        webhook_id text not null references notices.webhooks,
        event_id text not null,
        type text not null,
        aggregate_id text not null,
        version bigint not null,
        organisation_id text,
        project_id text,
        correlation_id text not null,
        occurred_at timestamptz not null,
        payload jsonb not null,
        state text not null default 'pending' check (state in ('pending', 'delivered', 'failed')),
        attempts int not null default 0,
        next_at timestamptz not null default clock_timestamp(),
        lease_until timestamptz,
        give_up_at timestamptz not null,
        error text not null default '',
        detail text not null default '',
        status int,
        created_at timestamptz not null default clock_timestamp(),
        finished_at timestamptz,
        check ((finished_at is null) = (state = 'pending')),
        unique (webhook_id, event_id)
    )
    """,
    "create unique index deliveries_newest on notices.deliveries (webhook_id, seq)",
    "create index deliveries_pending on notices.deliveries (webhook_id, seq) where state = 'pending'",
    "create index deliveries_ordered on notices.deliveries (webhook_id, aggregate_id, seq) where state = 'pending'",
    "create index deliveries_leased on notices.deliveries (webhook_id) where lease_until is not null",
    "create index deliveries_overdue on notices.deliveries (give_up_at) where state = 'pending'",
    "create index deliveries_finished on notices.deliveries (finished_at) where finished_at is not null",
    # How far the log of events has been read.
    "create table notices.progress (tx xid8 not null, seq bigint not null)",
    "insert into notices.progress values ('0', 0)",
)


def upgrade() -> None:
    """Create the tables of notices."""
    for statement in STATEMENTS:
        op.execute(statement)

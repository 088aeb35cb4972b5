"""Outbox, inbox, idempotency keys, standing faults and audit."""

from alembic import op

revision = "0001"
down_revision = None

STATEMENTS = (
    "create schema kit",
    # The shard, the time and the transaction id are the database's own: a reader that stops below the oldest running
    # transaction (pg_snapshot_xmin) never misses a row that commits late.
    """
    create table kit.outbox (
        seq bigint generated always as identity primary key,
        event_id text not null unique,
        type text not null,
        aggregate_id text not null,
        version bigint not null,
        shard int not null generated always as (abs(hashtext(aggregate_id) % 16)) stored,
        organisation_id text,
        project_id text,
        correlation_id text not null,
        payload jsonb not null,
        occurred_at timestamptz not null default clock_timestamp(),
        tx xid8 not null default pg_current_xact_id(),
        unique (aggregate_id, version)
    )
    """,
    # The log above is never updated. What is not yet published stands in this narrow list as well, which the relay
    # empties: marking a row of the log would write a new version of it into each of the log's indexes.
    """
    create table kit.waiting (
        seq bigint primary key,
        shard int not null,
        aggregate_id text not null,
        attempts int not null default 0,
        last_error text not null default '',
        dead boolean not null default false
    )
    """,
    "create index waiting_dead on kit.waiting (aggregate_id) where dead",
    """
    create function kit.enlist() returns trigger language plpgsql as
    $$ begin
        insert into kit.waiting (seq, shard, aggregate_id) select seq, shard, aggregate_id from added;
        return null;
    end $$
    """,
    """
    create trigger outbox_enlist after insert on kit.outbox referencing new table as added
        for each statement execute function kit.enlist()
    """,
    "create index outbox_project on kit.outbox (project_id, tx, seq)",
    "create index outbox_tx on kit.outbox (tx, seq)",
    "create index outbox_organisation on kit.outbox (organisation_id, tx, seq) where project_id is null",
    "create index outbox_correlation on kit.outbox (correlation_id)",
    """
    create table kit.inbox (
        consumer text not null,
        aggregate_id text not null,
        version bigint not null,
        event_id text not null,
        applied_at timestamptz not null default now(),
        primary key (consumer, aggregate_id)
    )
    """,
    """
    create table kit.idempotency (
        scope text not null,
        key text not null,
        digest bytea not null,
        response bytea not null,
        created_at timestamptz not null default now(),
        primary key (scope, key)
    )
    """,
    """
    create table kit.conditions (
        kind text not null,
        id text not null,
        reason text not null,
        repair text not null,
        since timestamptz not null default clock_timestamp(),
        seen_at timestamptz not null default clock_timestamp(),
        primary key (kind, id)
    )
    """,
    """
    create table kit.audit (
        id text primary key,
        at timestamptz not null default clock_timestamp(),
        actor_id text not null,
        actor_kind text not null,
        action text not null,
        target_id text not null,
        organisation_id text,
        project_id text,
        correlation_id text not null,
        detail jsonb not null,
        seq bigint generated always as identity,
        tx xid8 not null default pg_current_xact_id()
    )
    """,
    "create index audit_tx on kit.audit (tx, seq)",
    "create index audit_project on kit.audit (project_id, id)",
    "create index audit_organisation on kit.audit (organisation_id, id)",
    "create index audit_correlation on kit.audit (correlation_id)",
    """
    create function kit.refuse_change() returns trigger language plpgsql as
    $$ begin raise exception '% is append-only', tg_table_name; end $$
    """,
    # One chain per organisation, and one of the platform's own rows. Linked after the commit, in the order of the feed,
    # so that the requests that write audit rows never wait for one another.
    """
    create table kit.audit_chain (
        chain text not null,
        position bigint not null,
        audit_id text not null unique,
        hash bytea not null,
        linked_at timestamptz not null default clock_timestamp(),
        primary key (chain, position)
    )
    """,
    "create table kit.audit_progress (tx xid8 not null, seq bigint not null)",
    "insert into kit.audit_progress values ('0', 0)",
    """
    create trigger audit_chain_append_only before update or delete or truncate on kit.audit_chain
        for each statement execute function kit.refuse_change()
    """,
    """
    create trigger audit_append_only before update or delete or truncate on kit.audit
        for each statement execute function kit.refuse_change()
    """,
)


def upgrade() -> None:
    """Create the tables of kit."""
    for statement in STATEMENTS:
        op.execute(statement)

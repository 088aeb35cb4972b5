"""Functions: definitions, workers, invocations and what they say, dead letters, schedules, callbacks, time used."""

from alembic import op

revision = "0010"
down_revision = "0009"

STATEMENTS = (
    "create schema serverless",
    # Calls go to `serving_version`; it follows `current_version` once that has a worker, or when nothing is ready.
    # `wait_reason` says why no worker could be made, `create_after` when that is tried again.
    """
    create table serverless.functions (
        id text primary key,
        project_id text not null,
        organisation_id text not null,
        name text not null,
        current_version int not null,
        serving_version int not null,
        deleted boolean not null default false,
        row_version bigint not null default 1,
        created_by text not null,
        created_kind text not null,
        key_id text,
        wait_reason text not null default '',
        failures int not null default 0,
        create_after timestamptz not null default '-infinity',
        created_at timestamptz not null default clock_timestamp(),
        updated_at timestamptz not null default clock_timestamp()
    )
    """,
    "create unique index functions_name on serverless.functions (project_id, name) where not deleted",
    # A version never changes. `definition` is what was given; the columns are what hot paths read of it.
    """
    create table serverless.versions (
        function_id text not null references serverless.functions,
        number int not null,
        definition jsonb not null,
        digest bytea not null,
        slots int not null check (slots between 1 and 1000),
        tasks_per_worker int not null check (tasks_per_worker >= 1),
        workers_min int not null check (workers_min >= 0),
        workers_max int not null check (workers_max >= 1),
        idle_s double precision not null,
        requests_min int not null default 0,
        timeout_s double precision not null,
        retries int not null,
        retry_for text[] not null,
        retry_delay_s double precision not null default 1,
        webhook text,
        created_by text not null,
        created_at timestamptz not null default clock_timestamp(),
        primary key (function_id, number)
    )
    """,
    # A worker is an allocation with a sidecar's connection. Its lease is renewed by heartbeats; `inflight` is changed
    # by the statements that give it attempts and take them away. `request` is the function's name in subjects.
    """
    create table serverless.workers (
        id text primary key,
        function_id text not null references serverless.functions,
        project_id text not null,
        request text not null,
        version int not null,
        allocation_id text not null unique,
        state text not null check (state in ('starting', 'ready', 'draining', 'gone')),
        reason text not null default '',
        slots int not null,
        inflight int not null default 0 check (inflight >= 0),
        served bigint not null default 0,
        token_hash bytea not null,
        mac_key bytea not null,
        lease_until timestamptz not null,
        created_at timestamptz not null default clock_timestamp(),
        ready_at timestamptz,
        active_at timestamptz not null default clock_timestamp(),
        served_before bigint not null default 0,
        looked_at timestamptz not null default clock_timestamp(),
        gone_at timestamptz
    ) with (fillfactor = 50)
    """,
    "create index workers_function on serverless.workers (function_id, state) where state <> 'gone'",
    "create index workers_lease on serverless.workers (lease_until) where state <> 'gone'",
    "create index workers_gone on serverless.workers (gone_at) where state = 'gone'",
    # `waiting`: wants a worker, from `due_at`. It says so whatever the state is, because states never go back: an
    # attempt that was lost while it ran waits again and is still `running`. `lost` counts attempts that ended with
    # their worker, `tries` those that the handler failed.
    """
    create table serverless.invocations (
        project_id text not null,
        id text not null,
        seq bigint generated always as identity,
        function_id text,
        function_name text not null,
        mode text not null check (mode in ('async', 'sync', 'stream')),
        state text not null default 'queued' check (state in
            ('queued', 'dispatching', 'running', 'succeeded', 'failed', 'expired', 'cancelled', 'dead_lettered')),
        waiting boolean not null default true,
        due_at timestamptz not null default clock_timestamp(),
        expires_at timestamptz,
        published boolean not null default false,
        version int,
        attempt int not null default 0,
        lost int not null default 0,
        tries int not null default 0,
        token bytea,
        worker_id text,
        content_type text not null,
        headers jsonb not null,
        attributes jsonb not null,
        payload bytea,
        payload_ref jsonb,
        payload_hash bytea not null,
        timeout_s double precision,
        reply_to text not null default '',
        webhook text,
        parent_id text,
        key_id text,
        created_by text not null,
        correlation_id text not null,
        created_at timestamptz not null default clock_timestamp(),
        dispatched_at timestamptz,
        started_at timestamptz,
        finished_at timestamptz,
        duration_ms bigint not null default 0,
        status_code int not null default 0,
        result_type text not null default '',
        result_headers jsonb,
        result bytea,
        result_ref jsonb,
        encoding text not null default '',
        failure_class text not null default '',
        error text not null default '',
        error_type text not null default '',
        traceback text not null default '',
        progress text,
        primary key (project_id, id),
        check ((finished_at is null) = (state in ('queued', 'dispatching', 'running'))),
        check (not waiting or (worker_id is null and finished_at is null)),
        check (waiting or finished_at is not null or (worker_id is not null and token is not null))
    ) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05)
    """,
    "create index invocations_waiting on serverless.invocations (function_id, due_at, seq) where waiting",
    # One index for one question: plans that are made while the table is empty stay, and to them all that fit are alike.
    # So none but the primary key begins with the project, and none but that of what waits with the function itself.
    "create index invocations_function on serverless.invocations ((function_id || ''), seq)",
    "create index invocations_stillborn on serverless.invocations (project_id, seq) where function_id is null",
    """
    create index invocations_worker on serverless.invocations (worker_id)
        where worker_id is not null and finished_at is null
    """,
    """
    create index invocations_expiry on serverless.invocations (expires_at) where waiting
    """,
    "create index invocations_unpublished on serverless.invocations (seq) where waiting and not published",
    # For the sweep of what is old; it costs the statements that end invocations nothing.
    """
    create index invocations_finished on serverless.invocations using brin (finished_at) with (autosummarize = on)
    """,
    # What handlers said, in the order of attempt and seq.
    """
    create table serverless.outputs (
        project_id text not null,
        invocation_id text not null,
        attempt int not null,
        seq int not null,
        kind text not null check (kind in ('stdout', 'stderr', 'progress', 'chunk')),
        text text not null,
        at timestamptz not null default clock_timestamp(),
        place bigint generated always as identity,
        function_id text not null,
        primary key (project_id, invocation_id, attempt, seq)
    )
    """,
    "create index outputs_function on serverless.outputs (function_id, place)",
    "create index outputs_at on serverless.outputs (at)",
    """
    create table serverless.dead_letters (
        id text primary key,
        project_id text not null,
        function_id text,
        function_name text not null,
        source text not null check (source in ('invocation', 'dispatch', 'result', 'metric')),
        invocation_id text,
        failure_class text not null,
        error text not null,
        subject text not null,
        deliveries int not null default 0,
        payload bytea not null,
        created_at timestamptz not null default clock_timestamp(),
        replayed_as text,
        replayed_at timestamptz
    )
    """,
    "create index dead_letters_project on serverless.dead_letters (project_id, id)",
    "create index dead_letters_at on serverless.dead_letters (created_at)",
    # Fired by whoever takes the row when `next_at` has come; the invocation's id is made of function and time.
    """
    create table serverless.schedules (
        function_id text primary key references serverless.functions,
        cron text not null,
        timezone text not null,
        payload jsonb,
        next_at timestamptz not null
    )
    """,
    "create index schedules_next on serverless.schedules (next_at)",
    # A result that its function's owner wants to be told. Written by the statement that commits the result.
    """
    create table serverless.callbacks (
        id text primary key default 'cbk_' || replace(gen_random_uuid()::text, '-', ''),
        project_id text not null,
        invocation_id text not null,
        url text not null,
        attempts int not null default 0,
        next_at timestamptz not null default clock_timestamp(),
        lease_until timestamptz,
        delivered_at timestamptz,
        failed_at timestamptz,
        error text not null default '',
        created_at timestamptz not null default clock_timestamp(),
        unique (project_id, invocation_id)
    )
    """,
    "create index callbacks_next on serverless.callbacks (next_at) where delivered_at is null and failed_at is null",
    # The key that a project's callbacks are signed with.
    """
    create table serverless.signing_keys (
        project_id text primary key,
        key_id text not null,
        sealed bytea not null,
        created_at timestamptz not null default clock_timestamp()
    )
    """,
    # Units of the source's contract: what was asked for last, and the function that it became.
    """
    create table serverless.units (
        project_id text not null,
        name text not null,
        body jsonb not null,
        function_id text not null references serverless.functions,
        created_at timestamptz not null default clock_timestamp(),
        primary key (project_id, name)
    )
    """,
    # What made and changed them: an operation has one effect.
    """
    create table serverless.unit_operations (
        project_id text not null,
        operation_id text not null,
        unit text not null,
        kind text not null check (kind in ('create', 'update')),
        body jsonb not null,
        primary key (project_id, operation_id),
        foreign key (project_id, unit) references serverless.units on delete cascade
    )
    """,
    "create index on serverless.unit_operations (project_id, unit)",
    # What handlers took, by function, key and minute, until it becomes a fact for billing.
    """
    create table serverless.spent (
        function_id text not null,
        project_id text not null,
        organisation_id text not null,
        key_id text not null,
        minute timestamptz not null,
        invocations bigint not null,
        duration_ms bigint not null,
        primary key (function_id, key_id, minute)
    )
    """,
)


def upgrade() -> None:
    """Create the tables of serverless."""
    for statement in STATEMENTS:
        op.execute(statement)

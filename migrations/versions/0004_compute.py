"""SKUs, quotas, allocations, claims and timelines."""

from alembic import op

revision = "0004"
down_revision = "0003"

STATEMENTS = (
    "create schema compute",
    """
    create table compute.skus (
        name text primary key,
        description text not null,
        gpu_model text not null,
        gpu_counts int[] not null check (cardinality(gpu_counts) between 1 and 32),
        price_microusd_per_gpu_hour bigint not null check (price_microusd_per_gpu_hour >= 0),
        memory_bytes_per_gpu bigint not null,
        cpus_per_gpu double precision not null,
        processes_max int not null,
        scratch_bytes bigint not null,
        enabled boolean not null default true,
        updated_at timestamptz not null default now()
    )
    """,
    """
    insert into compute.skus (name, description, gpu_model, gpu_counts, price_microusd_per_gpu_hour,
        memory_bytes_per_gpu, cpus_per_gpu, processes_max, scratch_bytes)
    values ('g1.1', 'Any GPU, with 1 CPU and 2 GiB of memory for each', '*', '{1,2,4,8}', 3490000,
        2147483648, 1, 4096, 10737418240)
    """,
    # A row without a limit stands for the installation's default: creates lock it, so that they count one by one.
    """
    create table compute.quotas (
        project_id text primary key,
        gpus_max int check (gpus_max >= 0),
        updated_at timestamptz not null default now()
    )
    """,
    """
    create table compute.allocations (
        id text primary key,
        project_id text not null,
        organisation_id text not null,
        name text,
        purpose text not null,
        sku text not null,
        gpus int not null check (gpus > 0),
        image text not null,
        labels jsonb not null,
        env jsonb not null,
        command jsonb not null,
        ports int[] not null,
        secrets jsonb not null default '[]',
        egress jsonb not null default '[]',
        runtime text not null default '',
        stock_id text,
        state text not null,
        reason text not null,
        failing text not null default '',
        version bigint not null default 1,
        fence bigint not null default 1,
        node_id text,
        unit_id text not null,
        price_microusd_per_hour bigint not null,
        memory_bytes bigint not null,
        cpus double precision not null,
        processes_max int not null,
        scratch_bytes bigint not null,
        wait_s int not null,
        correlation_id text not null,
        created_at timestamptz not null default clock_timestamp(),
        changed_at timestamptz not null default clock_timestamp(),
        placed_at timestamptz,
        driven_at timestamptz,
        asked_at timestamptz,
        deadline_at timestamptz,
        active_at timestamptz,
        billing_ended_at timestamptz,
        ended_at timestamptz,
        gpu_uuids text[] not null default '{}',
        simulated boolean not null default false,
        timeline jsonb not null,
        constraint rest_has_no_deadline check (
            (deadline_at is null) = (state in ('active', 'release_failed', 'released', 'failed')))
    )
    """,
    # A unit has one owner at a time: stock that is handed over ends as its tenant's allocation begins.
    "create unique index allocations_unit on compute.allocations (unit_id) where ended_at is null",
    "create index allocations_project on compute.allocations (project_id, id)",
    """
    create index allocations_counted on compute.allocations (project_id)
        where state in ('requested', 'provisioning', 'active', 'releasing')
    """,
    "create index allocations_moving on compute.allocations (deadline_at) where deadline_at is not null",
    """
    create index allocations_waiting on compute.allocations (sku, gpus, created_at)
        where state = 'requested' and node_id is null
    """,
    "create index allocations_placed on compute.allocations (project_id, placed_at desc) where placed_at is not null",
    "create index allocations_node on compute.allocations (node_id) where ended_at is null",
    # A slot is held by at most one allocation: the index is what makes it so.
    """
    create table compute.claims (
        id bigint generated always as identity primary key,
        slot_id text not null,
        allocation_id text not null references compute.allocations deferrable initially deferred,
        node_id text not null,
        gpu_uuid text not null,
        gpu_index int not null,
        simulated boolean not null,
        claimed_at timestamptz not null default clock_timestamp(),
        released_at timestamptz
    )
    """,
    "create unique index claims_held on compute.claims (slot_id) where released_at is null",
    "create index claims_node on compute.claims (node_id) where released_at is null",
    "create index claims_allocation on compute.claims (allocation_id)",
    """
    create view compute.quota_use as
        select project_id, sum(gpus)::bigint as gpus_used from compute.allocations
        where state in ('requested', 'provisioning', 'active', 'releasing') group by project_id
    """,
)


def upgrade() -> None:
    """Create the tables of compute."""
    for statement in STATEMENTS:
        op.execute(statement)

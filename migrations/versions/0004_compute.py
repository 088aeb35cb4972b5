"""SKUs, quotas, allocations, claims and timelines."""

from alembic import op

revision = "0004"
down_revision = "0003"

STATEMENTS = (
    "create schema compute",
    # Lets a constraint say "the same GPU, another project".
    "create extension if not exists btree_gist",
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
        share text not null default 'gpu' check (share in ('gpu', 'mig', 'mps')),
        mig_profile text not null default '',
        share_memory_bytes_min bigint not null default 0 check (share_memory_bytes_min >= 0),
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
    create table compute.egress (
        project_id text primary key,
        rules jsonb not null,
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
        key_id text,
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
        serving jsonb,
        stock_id text,
        yields_to text,
        state text not null,
        reason text not null,
        failing text not null default '',
        version bigint not null default 1,
        fence bigint not null default 1,
        -- How often it was placed anew because a node did not take it.
        relocations int not null default 0,
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
        settled boolean not null default false,
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
    "create index allocations_units on compute.allocations (unit_id)",
    # Stock is picked by shape, oldest first; what ended lately says whether starting more makes sense.
    """
    create index allocations_ready_stock on compute.allocations (sku, gpus, image, active_at)
        where purpose = 'stock' and state = 'active'
    """,
    "create index allocations_stock on compute.allocations (sku, gpus, image, ended_at) where purpose = 'stock'",
    "create index allocations_living_stock on compute.allocations (id) where purpose = 'stock' and ended_at is null",
    "create index allocations_handed on compute.allocations (sku, gpus, image, created_at) where stock_id is not null",
    "create index allocations_yielding on compute.allocations (yields_to) where yields_to is not null",
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
    # What somebody pays for, or will, or has not paid for to the end.
    """
    create index allocations_payer on compute.allocations (organisation_id, project_id)
        where not settled and purpose <> 'stock' and (ended_at is null or active_at is not null)
    """,
    # The meter's view: every allocation from its activation until it is paid for to the end. `heard_until` is when its
    # unit was last known to run: in the last list of its node, or before it was gone.
    """
    create view compute.billable as
        select a.id as allocation_id, a.organisation_id, a.project_id, a.key_id, a.purpose, a.sku, a.gpus, a.labels,
            a.price_microusd_per_hour, a.active_at, a.billing_ended_at,
            coalesce(e.ran_until, n.listed_at) as heard_until
        from compute.allocations a
        left join fleet.last_lists n on n.node_id = a.node_id
        left join fleet.unit_ends e on e.node_id = a.node_id and e.unit_id = a.unit_id
        where a.active_at is not null and not a.settled and a.purpose <> 'stock'
    """,
    # What each organisation has asked for and not given back, at its price.
    """
    create view compute.commitments as
        select id as allocation_id, organisation_id, project_id, key_id, price_microusd_per_hour
        from compute.allocations
        where not settled and purpose <> 'stock' and ended_at is null
            and state in ('requested', 'provisioning', 'active')
    """,
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
        project_id text not null,
        kind text not null,
        whole_uuid text not null,
        rack_id int not null,
        claimed_at timestamptz not null default clock_timestamp(),
        released_at timestamptz,
        -- The shares of a GPU by MPS see one another's faults, so they belong to one project at a time.
        constraint claims_one_project exclude using gist (node_id with =, whole_uuid with =, project_id with <>)
            where (released_at is null and kind = 'mps')
    )
    """,
    "create unique index claims_held on compute.claims (slot_id) where released_at is null",
    "create index claims_node on compute.claims (node_id) where released_at is null",
    # Placement counts by rack, from this index alone.
    "create index claims_rack on compute.claims (kind, rack_id) include (project_id) where released_at is null",
    "create index claims_allocation on compute.claims (allocation_id)",
    # Who waits for capacity. A request is reserved while stock is being stopped for it: then it is in nobody's way.
    """
    create view compute.waiting as
        select a.id, a.project_id, a.sku, a.gpus, a.created_at, exists (
            select 1 from compute.allocations s where s.yields_to = a.id and s.state = 'releasing') as reserved
        from compute.allocations a where a.state = 'requested' and a.node_id is null
    """,
    # How many units of a shape are kept ready; `reason` is why there are fewer, as the keeper last saw it.
    """
    create table compute.stock_floors (
        sku text not null references compute.skus,
        gpus int not null check (gpus > 0),
        image text not null,
        floor int not null check (floor >= 0),
        reason text not null default '',
        updated_at timestamptz not null default clock_timestamp(),
        primary key (sku, gpus, image)
    )
    """,
    # A lock stays while a name or an allocation that has not ended refers to it; it never changes.
    """
    create table compute.locks (
        digest text primary key,
        base text not null,
        lock text not null,
        packages int not null,
        used_at timestamptz not null default clock_timestamp()
    )
    """,
    """
    create table compute.runtimes (
        project_id text not null,
        name text not null,
        digest text not null references compute.locks,
        version int not null default 1,
        created_at timestamptz not null default clock_timestamp(),
        updated_at timestamptz not null default clock_timestamp(),
        primary key (project_id, name)
    )
    """,
    "create index runtimes_digest on compute.runtimes (digest)",
    # Requirements by name and the lock that a node made of them. The newest that succeeded answers the same text again.
    """
    create table compute.resolutions (
        id text primary key,
        project_id text not null,
        base text not null,
        requirements text not null,
        state text not null default 'queued' check (state in ('queued', 'running', 'succeeded', 'failed')),
        lock text not null default '',
        python text not null default '',
        error_code text not null default '',
        error text not null default '',
        task_id text,
        nodes_tried text[] not null default '{}',
        correlation_id text not null,
        created_by text not null,
        created_at timestamptz not null default clock_timestamp(),
        looked_at timestamptz,
        finished_at timestamptz
    )
    """,
    "create index resolutions_text on compute.resolutions (project_id, base, md5(requirements), created_at)",
    "create index resolutions_open on compute.resolutions (project_id, created_at) where finished_at is null",
    "create index resolutions_running on compute.resolutions (looked_at nulls first) where state = 'running'",
    "create index allocations_runtime on compute.allocations (runtime) where ended_at is null and runtime <> ''",
    """
    create view compute.quota_use as
        select project_id, sum(gpus)::bigint as gpus_used from compute.allocations
        where state in ('requested', 'provisioning', 'active', 'releasing') group by project_id
    """,
    # Locks the quota, then counts: a single statement would count with eyes from before it had to wait.
    """
    create function compute.lock_quota(project text, out quota_gpus int, out used_gpus bigint) language plpgsql as
    $$ begin
        select gpus_max into quota_gpus from compute.quotas where project_id = project for update;
        if not found then
            insert into compute.quotas (project_id) values (project) on conflict (project_id) do nothing;
            select gpus_max into quota_gpus from compute.quotas where project_id = project for update;
        end if;
        select coalesce((select gpus_used from compute.quota_use where project_id = project), 0) into used_gpus;
    end $$
    """,
)


def upgrade() -> None:
    """Create the tables of compute."""
    for statement in STATEMENTS:
        op.execute(statement)

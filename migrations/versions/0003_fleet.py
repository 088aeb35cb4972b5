"""Nodes, slots, enrolment, certificates, links and node tasks."""

from alembic import op

revision = "0003"
down_revision = "0002"

STATEMENTS = (
    "create schema fleet",
    """
    create table fleet.nodes (
        id text primary key,
        name text not null,
        state text not null,
        state_reason text not null default '',
        desired text not null default 'ready' check (desired in ('ready', 'cordoned', 'draining')),
        version bigint not null default 1,
        gpus_approved int not null,
        gpus_reported int not null default 0,
        simulated boolean not null default false,
        production boolean not null default false,
        -- A sidecar stands ready for units that serve.
        serves_functions boolean not null default false,
        agent_version text not null default '',
        boot_id text not null default '',
        driver_version text not null default '',
        labels jsonb not null default '{}',
        -- When a draining node's allocations are released.
        release_at timestamptz,
        state_changed_at timestamptz not null default now(),
        created_at timestamptz not null default now(),
        check (state in ('pending', 'enrolled', 'ready', 'cordoned', 'draining', 'unreachable', 'lost', 'retired'))
    )
    """,
    "create unique index nodes_name on fleet.nodes (name) where state <> 'retired'",
    "create index nodes_state on fleet.nodes (state)",
    # Apart from the nodes, and roomy, so that a thousand heartbeats a second rewrite a narrow row in its own page.
    # `listed_at` is the last one that named the node's units, and `listed_before_at` the one before: a node that
    # connects gives a sign of life first, and its units later.
    """
    create table fleet.heartbeats (
        node_id text primary key references fleet.nodes (id),
        at timestamptz not null,
        listed_at timestamptz,
        listed_before_at timestamptz,
        skew_s double precision not null default 0,
        trouble text not null default ''
    ) with (fillfactor = 50)
    """,
    # Since when some gateway has listened to nodes without a pause, and until when. Nodes' silence counts only then.
    """
    create table fleet.listening (
        only_row boolean primary key default true check (only_row),
        since timestamptz not null,
        at timestamptz not null
    )
    """,
    """
    create table fleet.enrolment_tokens (
        id text primary key,
        digest bytea not null unique,
        node_id text not null references fleet.nodes (id),
        kind text not null check (kind in ('enrol', 'recover')),
        expires_at timestamptz not null,
        created_at timestamptz not null default now()
    )
    """,
    "create index enrolment_tokens_node on fleet.enrolment_tokens (node_id)",
    """
    create table fleet.certificates (
        serial text primary key,
        node_id text not null references fleet.nodes (id),
        not_after timestamptz not null,
        issued_at timestamptz not null default now(),
        revoked_at timestamptz
    )
    """,
    "create index certificates_node on fleet.certificates (node_id, not_after)",
    # The equal places of a node that placement counts together: its whole GPUs of a model, or the shares of one GPU.
    # `slots` counts those that are there, well or not; it changes only with an inventory.
    """
    create table fleet.racks (
        id int generated always as identity primary key,
        node_id text not null references fleet.nodes (id),
        kind text not null check (kind in ('gpu', 'mig', 'mps')),
        gpu_model text not null,
        profile text not null,
        parent_uuid text not null,
        memory_bytes bigint not null,
        slots int not null default 0,
        unique (node_id, kind, gpu_model, profile, parent_uuid)
    )
    """,
    "create index racks_filled on fleet.racks (kind, node_id) where slots > 0",
    """
    create table fleet.slots (
        id text primary key,
        node_id text not null references fleet.nodes (id),
        gpu_uuid text not null,
        parent_uuid text not null default '',
        -- The GPU that a share is part of, or the GPU itself: what fails, and is quarantined, as one.
        whole_uuid text not null generated always as (coalesce(nullif(parent_uuid, ''), gpu_uuid)) stored,
        gpu_index int not null,
        gpu_model text not null,
        memory_bytes bigint not null,
        pci_address text not null,
        numa_node int not null,
        kind text not null check (kind in ('gpu', 'mig', 'mps')),
        profile text not null,
        threads_percent int not null,
        nvlink_domain text not null,
        rack_id int not null references fleet.racks (id),
        simulated boolean not null,
        present boolean not null default true,
        gpu_healthy boolean not null default true,
        gpu_detail text not null default '',
        quarantined boolean not null default false,
        quarantine_detail text not null default '',
        blocked boolean not null default false,
        blocked_reason text not null default '',
        version bigint not null default 0,
        health text not null generated always as (
            case when blocked then 'cleanup_blocked'
                 when not present then 'missing'
                 when quarantined then 'quarantined'
                 when not gpu_healthy then 'degraded'
                 else 'healthy' end) stored,
        created_at timestamptz not null default now(),
        unique (node_id, gpu_uuid)
    )
    """,
    "create index slots_unhealthy on fleet.slots (rack_id) where health <> 'healthy'",
    # One row for each time that a GPU was taken out of service, until it was proved to work. `release_reason` is why
    # what runs on it has to leave; empty where it may stay. `well_since` is since when its node reports it healthy.
    """
    create table fleet.gpu_quarantines (
        id text primary key,
        node_id text not null references fleet.nodes (id),
        gpu_uuid text not null,
        cause text not null check (cause in ('failed', 'operator')),
        detail text not null,
        release_reason text not null,
        version bigint not null default 1,
        since timestamptz not null default clock_timestamp(),
        well_since timestamptz,
        return_asked_at timestamptz,
        probe_task_id text,
        probe_asked_at timestamptz,
        probe_detail text not null default '',
        returned_at timestamptz
    )
    """,
    """
    create unique index gpu_quarantines_open on fleet.gpu_quarantines (node_id, gpu_uuid)
        where returned_at is null
    """,
    # Overwritten all the time and worth nothing after a crash.
    """
    create unlogged table fleet.gpu_readings (
        node_id text not null,
        gpu_uuid text not null,
        at timestamptz not null,
        temperature_c int,
        power_w real,
        utilization_percent int,
        memory_used_bytes bigint,
        ecc_corrected bigint,
        ecc_uncorrected bigint,
        faults int not null,
        primary key (node_id, gpu_uuid)
    ) with (fillfactor = 50)
    """,
    """
    create table fleet.links (
        node_id text primary key references fleet.nodes (id),
        link_id text not null,
        gateway_id text not null,
        address text not null,
        serial text not null,
        connected_at timestamptz not null default now()
    )
    """,
    # A unit that its node lists no more stays for a day, as `gone`. `seen_at` is when one that is gone or exited was
    # last known to run: in the list before. `unheard` says that the node was away or silent in between.
    """
    create table fleet.unit_reports (
        node_id text not null references fleet.nodes (id),
        unit_id text not null,
        state text not null,
        exit_code int,
        exit_class text not null,
        since timestamptz not null default now(),
        seen_at timestamptz,
        unheard boolean not null default false,
        primary key (node_id, unit_id)
    )
    """,
    "create index unit_reports_unit on fleet.unit_reports (unit_id)",
    "create index unit_reports_unheard on fleet.unit_reports (unit_id) where unheard",
    """
    create view fleet.units as
    select u.unit_id, u.node_id, u.state, u.exit_code, u.exit_class, u.since, h.listed_at as reported_at
      from fleet.unit_reports u join fleet.heartbeats h using (node_id) where u.state <> 'gone'
    """,
    # When the nodes that answer last said which units they have: not yet, when one has just connected.
    """
    create view fleet.reporting_nodes as
    select n.id as node_id, h.listed_at as reported_at from fleet.nodes n join fleet.heartbeats h on h.node_id = n.id
     where n.state in ('ready', 'cordoned', 'draining') and h.listed_at is not null
    """,
    # When each node last named its units, also one that does not answer any more.
    """
    create view fleet.last_lists as
    select node_id, listed_at from fleet.heartbeats where listed_at is not null
    """,
    # Until when a unit that is over was known to run. One that a node reports without having been silent before ran
    # until then; after a silence nobody knows, and nobody pays for it.
    """
    create view fleet.unit_ends as
    select unit_id, node_id, state, unheard, since,
        case when state = 'exited' and not unheard then since else seen_at end as ran_until
      from fleet.unit_reports where state in ('exited', 'gone') and seen_at is not null
    """,
    """
    create table fleet.fences (
        allocation_id text primary key,
        fence bigint not null,
        changed_at timestamptz not null default now()
    )
    """,
    """
    create table fleet.tasks (
        id text primary key,
        seq bigint generated always as identity,
        node_id text not null references fleet.nodes (id),
        type text not null,
        allocation_id text,
        fence bigint not null,
        dedupe_key text not null unique,
        state text not null default 'queued'
            check (state in ('queued', 'leased', 'succeeded', 'failed', 'refused', 'expired')),
        body bytea not null,
        key_id text not null,
        signature bytea not null,
        correlation_id text not null,
        attempts int not null default 0,
        leased_by text,
        leased_until timestamptz,
        answer bytea not null default '\\xc0',
        error_code text not null default '',
        detail text not null default '',
        created_at timestamptz not null default clock_timestamp(),
        expires_at timestamptz not null,
        finished_at timestamptz
    )
    """,
    "create index tasks_node on fleet.tasks (node_id, seq)",
    "create index tasks_open on fleet.tasks (node_id, seq) where state in ('queued', 'leased')",
    "create index tasks_allocation on fleet.tasks (allocation_id) where state in ('queued', 'leased')",
    "create index tasks_expiry on fleet.tasks (expires_at) where state in ('queued', 'leased')",
    "create index tasks_link on fleet.tasks (leased_by) where state = 'leased'",
    "create index tasks_correlation on fleet.tasks (correlation_id)",
    "create index tasks_finished on fleet.tasks (finished_at) where finished_at is not null",
    # The contract with placement: what may be claimed, as far as the fleet knows.
    """
    create view fleet.placeable_slots as
    select s.id as slot_id, s.node_id, s.gpu_uuid, s.gpu_index, s.gpu_model, s.memory_bytes, s.simulated, s.numa_node,
           s.kind, s.whole_uuid, s.profile, s.nvlink_domain, s.rack_id, n.serves_functions
      from fleet.slots s join fleet.nodes n on n.id = s.node_id
     where n.state = 'ready' and s.health = 'healthy'
    """,
    # The same counted by rack, so that ten thousand slots need not be looked at one by one: a rack's placeable slots
    # are its `slots` less those of `unhealthy_slots` that are there. A node is `linked` while a gateway holds its
    # link, and `fresh` when it was also heard of just now, without trouble: one that died a moment ago is not, nor one
    # whose disk is full.
    """
    create view fleet.placeable_racks as
    select r.id as rack_id, r.node_id, r.kind, r.gpu_model, r.profile, r.parent_uuid, r.memory_bytes, r.slots,
           n.serves_functions, l.node_id is not null as linked,
           l.node_id is not null and h.at > clock_timestamp() - interval '8 seconds' and h.trouble = '' as fresh
      from fleet.racks r join fleet.nodes n on n.id = r.node_id
      left join fleet.heartbeats h on h.node_id = n.id
      left join fleet.links l on l.node_id = n.id
     where n.state = 'ready' and r.slots > 0
    """,
    """
    create view fleet.unhealthy_slots as
    select id as slot_id, rack_id, present, blocked from fleet.slots where health <> 'healthy'
    """,
    # Also for placement: what would be there if all were well, so that a refusal can say so.
    """
    create view fleet.unplaceable_slots as
    select s.id as slot_id, s.node_id, s.gpu_model, s.memory_bytes, s.kind, s.profile, s.whole_uuid,
           n.state as node_state, s.health, n.serves_functions
      from fleet.slots s join fleet.nodes n on n.id = s.node_id
     where n.state in ('ready', 'cordoned', 'draining', 'unreachable') and s.health <> 'missing'
       and not (n.state = 'ready' and s.health = 'healthy')
    """,
)


def upgrade() -> None:
    """Create the tables of the fleet."""
    for statement in STATEMENTS:
        op.execute(statement)

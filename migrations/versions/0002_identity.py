"""Organisations, projects, principals, members, API keys, identity providers and sessions."""

from alembic import op

revision = "0002"
down_revision = "0001"

STATEMENTS = (
    "create schema identity",
    """
    create table identity.organisations (
        id text primary key,
        name text not null,
        created_at timestamptz not null default now()
    )
    """,
    """
    create table identity.projects (
        id text primary key,
        organisation_id text not null references identity.organisations,
        name text not null,
        version bigint not null default 1,
        created_at timestamptz not null default now(),
        archived_at timestamptz
    )
    """,
    "create unique index projects_name on identity.projects (organisation_id, name) where archived_at is null",
    """
    create table identity.principals (
        id text primary key,
        kind text not null check (kind in ('user', 'service_account')),
        display_name text not null,
        operator boolean not null default false,
        created_at timestamptz not null default now(),
        disabled_at timestamptz
    )
    """,
    """
    create table identity.users (
        id text primary key references identity.principals,
        issuer text not null,
        subject text not null,
        unique (issuer, subject)
    )
    """,
    """
    create table identity.service_accounts (
        id text primary key references identity.principals,
        project_id text not null references identity.projects,
        unique (project_id, id)
    )
    """,
    """
    create table identity.members (
        project_id text not null references identity.projects,
        principal_id text not null references identity.principals,
        role text not null check (role in ('owner', 'admin', 'developer', 'viewer', 'billing')),
        created_at timestamptz not null default now(),
        primary key (project_id, principal_id)
    )
    """,
    "create index members_principal on identity.members (principal_id)",
    # Only the hash of a key is kept; the hint is its last four characters.
    """
    create table identity.keys (
        id text primary key,
        digest bytea not null unique,
        hint text not null,
        name text not null,
        role text not null check (role in ('owner', 'admin', 'developer', 'viewer', 'billing')),
        principal_id text not null references identity.principals,
        project_id text not null references identity.projects,
        created_at timestamptz not null default now(),
        expires_at timestamptz,
        revoked_at timestamptz,
        last_used_at timestamptz
    )
    """,
    "create index keys_project on identity.keys (project_id, id)",
    "create index keys_principal on identity.keys (principal_id)",
    """
    create table identity.providers (
        name text primary key,
        issuer text not null unique,
        client_id text not null,
        client_secret text not null,
        audiences text[] not null,
        scopes text[] not null,
        groups_claim text not null,
        session_s integer not null check (session_s between 60 and 604800),
        enabled boolean not null,
        created_at timestamptz not null default now()
    )
    """,
    # What a group of a provider may do: in one project, in all of an organisation, or as an operator. Never written
    # into members: it holds for as long as the person's token or session carries the group.
    """
    create table identity.group_roles (
        id text primary key,
        provider text not null references identity.providers on delete cascade,
        group_name text not null,
        organisation_id text references identity.organisations,
        project_id text references identity.projects,
        operator boolean not null default false,
        role text check (role in ('owner', 'admin', 'developer', 'viewer', 'billing')),
        created_at timestamptz not null default now(),
        check (num_nonnulls(organisation_id, project_id, nullif(operator, false)) = 1),
        check (operator = (role is null)),
        unique nulls not distinct (provider, group_name, organisation_id, project_id, operator)
    )
    """,
    # Only hashes are kept: of the session's own token, and of the provider's that it was made from, which works once.
    """
    create table identity.sessions (
        id text primary key,
        digest bytea not null unique,
        token_digest bytea not null unique,
        principal_id text not null references identity.principals,
        provider text not null references identity.providers on delete cascade,
        groups text[] not null,
        created_at timestamptz not null default now(),
        expires_at timestamptz not null,
        revoked_at timestamptz,
        last_used_at timestamptz
    )
    """,
    "create index sessions_principal on identity.sessions (principal_id, id)",
    "create index sessions_expiry on identity.sessions (expires_at)",
)


def upgrade() -> None:
    """Create the tables of identity."""
    for statement in STATEMENTS:
        op.execute(statement)

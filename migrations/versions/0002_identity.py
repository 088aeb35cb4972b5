"""Organisations, projects, principals, members and API keys."""

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
)


def upgrade() -> None:
    """Create the tables of identity."""
    for statement in STATEMENTS:
        op.execute(statement)

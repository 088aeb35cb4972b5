"""Project secrets and their versions."""

from alembic import op

revision = "0006"
down_revision = "0005"

STATEMENTS = (
    "create schema secrets",
    # A deleted secret keeps its row while versions of it are kept: a new one of the name goes on counting.
    """
    create table secrets.secrets (
        project_id text not null,
        name text not null,
        version bigint not null,
        created_at timestamptz not null default clock_timestamp(),
        created_by text not null,
        updated_at timestamptz not null default clock_timestamp(),
        updated_by text not null,
        deleted_at timestamptz,
        primary key (project_id, name)
    )
    """,
    # The value under its own data key, and that key under the master key `key_id`; both begin with their nonce.
    """
    create table secrets.versions (
        project_id text not null,
        name text not null,
        version bigint not null,
        bytes int not null,
        fits_env boolean not null,
        sealed bytea not null,
        wrapped_key bytea not null,
        key_id text not null,
        created_at timestamptz not null default clock_timestamp(),
        created_by text not null,
        superseded_at timestamptz,
        primary key (project_id, name, version),
        foreign key (project_id, name) references secrets.secrets
    )
    """,
    "create index versions_key on secrets.versions (key_id)",
    """
    create index versions_superseded on secrets.versions (project_id, name, version)
        where superseded_at is not null
    """,
)


def upgrade() -> None:
    """Create the tables of secrets."""
    for statement in STATEMENTS:
        op.execute(statement)

"""Objects, the blobs that hold their bytes, and how much each project uses."""

from alembic import op

revision = "0007"
down_revision = "0006"

STATEMENTS = (
    "create schema storage",
    # Which install this is, for the store to tell its own blobs from another's.
    "create table storage.install (id text not null default gen_random_uuid()::text)",
    "insert into storage.install default values",
    # What a project's blobs hold and have reserved; it is raised before bytes are taken.
    """
    create table storage.usage (
        project_id text primary key,
        bytes_used bigint not null check (bytes_used >= 0)
    )
    """,
    # A blob has its row before its first byte. One that is written has a lease, a doomed one a time to go: whatever is
    # past its time is deleted.
    """
    create table storage.blobs (
        id text primary key,
        project_id text not null,
        state text not null check (state in ('writing', 'live', 'doomed')),
        bytes bigint not null check (bytes >= 0),
        expires_at timestamptz,
        check ((expires_at is null) = (state = 'live'))
    )
    """,
    "create index blobs_expiry on storage.blobs (expires_at) where expires_at is not null",
    # Keys are ordered by their bytes, so that those with a common beginning stand together.
    """
    create table storage.objects (
        project_id text not null,
        key text collate "C" not null,
        blob_id text not null unique references storage.blobs,
        size bigint not null,
        sha256 bytea not null,
        content_type text not null,
        created_at timestamptz not null default clock_timestamp(),
        created_by text not null,
        primary key (project_id, key)
    )
    """,
)


def upgrade() -> None:
    """Create the tables of storage."""
    for statement in STATEMENTS:
        op.execute(statement)

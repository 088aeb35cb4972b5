"""Which gateway holds which node's tunnel."""

from alembic import op

revision = "0005"
down_revision = "0004"

STATEMENTS = (
    "create schema access",
    # Not in fleet.links: behind a balancer a node's link and its tunnel may land on different gateways.
    """
    create table access.tunnels (
        node_id text primary key,
        tunnel_id text not null unique,
        gateway_id text not null,
        address text not null,
        connected_at timestamptz not null default now()
    )
    """,
)


def upgrade() -> None:
    """Create the tables of access."""
    for statement in STATEMENTS:
        op.execute(statement)

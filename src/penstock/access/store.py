"""Which gateway holds which node's tunnel. The tunnel may be held by another gateway than the node's link."""

from collections.abc import Collection

from penstock.kit.db import Reader


async def hold(conn: Reader, *, node_id: str, tunnel_id: str, gateway_id: str, address: str) -> None:
    """From now on this is the node's tunnel."""
    await conn.execute(
        "insert into access.tunnels (node_id, tunnel_id, gateway_id, address) values ($1, $2, $3, $4)"
        " on conflict (node_id) do update set tunnel_id = excluded.tunnel_id, gateway_id = excluded.gateway_id,"
        " address = excluded.address, connected_at = now()",
        node_id,
        tunnel_id,
        gateway_id,
        address,
    )


async def drop(conn: Reader, tunnel_id: str) -> None:
    """The tunnel ended; a newer one of the same node stays."""
    await conn.execute("delete from access.tunnels where tunnel_id = $1", tunnel_id)


async def current(conn: Reader, tunnel_ids: Collection[str]) -> set[str]:
    """Those of the tunnels that no newer one has superseded."""
    rows = await conn.fetch("select tunnel_id from access.tunnels where tunnel_id = any($1)", list(tunnel_ids))
    return {row["tunnel_id"] for row in rows}


async def holder(conn: Reader, node_id: str) -> str | None:
    """The address of the gateway that holds the node's tunnel."""
    return await conn.fetchval("select address from access.tunnels where node_id = $1", node_id)

"""Each project's egress rules."""

from collections.abc import Sequence

from penstock.kit.db import Reader, Tx


async def rules(conn: Reader, project_id: str) -> list[str]:
    """As they were written; none means no way out."""
    return await conn.fetchval("select rules from compute.egress where project_id = $1", project_id) or []


async def put(tx: Tx, project_id: str, texts: Sequence[str]) -> None:
    """Set them all."""
    await tx.execute(
        "insert into compute.egress (project_id, rules) values ($1, $2)"
        " on conflict (project_id) do update set rules = excluded.rules, updated_at = now()",
        project_id,
        list(texts),
    )

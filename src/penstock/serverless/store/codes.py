"""Which archive a worker's version runs."""

from penstock.kit.db import Reader


async def find(conn: Reader, allocation_id: str) -> tuple[str, str, str] | None:
    """Project, object and digest, for the worker of this allocation while it lives; none without such code."""
    row = await conn.fetchrow(
        """
        select w.project_id, v.definition #>> '{code,object}' as object, v.definition #>> '{code,sha256}' as sha256
        from serverless.workers w
        join serverless.versions v on v.function_id = w.function_id and v.number = w.version
        where w.allocation_id = $1 and w.state <> 'gone'
        """,
        allocation_id,
    )
    return (row["project_id"], row["object"], row["sha256"]) if row and row["object"] else None

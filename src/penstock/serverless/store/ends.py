"""Ends that no worker brings about: too late, hopeless, or its function is gone."""

from typing import Final

import msgspec

from penstock.kit.db import Reader
from penstock.serverless.model import Committed
from penstock.serverless.store.commits import FOLLOWS

_RETURNED: Final = ", ".join(name for name in Committed.__dataclass_fields__ if name != "more").replace(
    "worker_id", "'' as worker_id"
)
#: Invocations that wait and match, at most so many; `$1` class, `$2` error, `$3` how many. In the order of an index,
#: which is then used whatever the planner knows of the table.
_END: Final = """
    with old as (
        select project_id, id from serverless.invocations i where waiting and {which}
        limit $3 for update skip locked
    ), ended as (
        update serverless.invocations i set waiting = false, state = '{state}', finished_at = clock_timestamp(),
            failure_class = $1, error = $2, status_code = {status}
        from old where i.project_id = old.project_id and i.id = old.id returning i.*
    ), {follows}
    select {returned} from ended
"""


async def expire(conn: Reader, *, limit: int) -> list[Committed]:
    """What waited longer than its sender wanted."""
    statement = _statement("i.expires_at < statement_timestamp() order by i.expires_at", state="expired", status=504)
    return await _end(conn, statement, "activation_timeout", "no worker could take it before its time was over", limit)


async def condemn(conn: Reader, function_id: str, failure_class: str, error: str, *, limit: int) -> list[Committed]:
    """What waits for a function that cannot be started, or is no more."""
    statement = _statement("i.function_id = $4 order by i.function_id, i.due_at, i.seq", state="failed", status=503)
    return await _end(conn, statement, failure_class, error, limit, function_id)


def _statement(which: str, *, state: str, status: int) -> str:
    return _END.format(
        which=which, state=state, status=status, follows=FOLLOWS.format(ended="ended"), returned=_RETURNED
    )


async def _end(conn: Reader, statement: str, failure_class: str, error: str, limit: int, *more: str) -> list[Committed]:
    rows = await conn.fetch(statement, failure_class, error, limit, *more)
    return [msgspec.convert(dict(row), Committed) for row in rows]

"""Where a project's units may connect to. New allocations take the rules as they are when they are made."""

from penstock.compute.store import egress as rows
from penstock.kit import audit
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import Invalid
from penstock.wire import egress
from penstock.wire.egress import BadRule


async def find(conn: Reader, caller: Caller) -> list[str]:
    """The project's rules."""
    caller.require("egress.read")
    return await rows.rules(conn, caller.project_id)


async def put(tx: Tx, caller: Caller, texts: list[str]) -> list[str]:
    """Replace them."""
    caller.require("egress.write")
    try:
        egress.parse_all(texts)
    except BadRule as error:
        raise Invalid(str(error), field="rules") from error
    await rows.put(tx, caller.project_id, texts)
    await audit.record(tx, caller.actor, "egress.put", caller.project_id, detail={"rules": texts})
    return texts

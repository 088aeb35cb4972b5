"""Which secrets a link may have: those that a task names which is leased to it and can still be done.

The task's own signed parameters say which they are; an agent names only the task.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from penstock.fleet.errors import NotLeased, SecretsRefused
from penstock.fleet.ports import Secrets
from penstock.fleet.store import tasks as task_rows
from penstock.fleet.store.links import LinkKey
from penstock.kit.db import Reader, Tx
from penstock.wire.tasks import UNIT_HANDOFF, UNIT_START, SecretRef, TaskBody, UnitHandoff, UnitStart


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What a task says that a unit gets. A function's worker also gets its keys."""

    allocation_id: str
    refs: Sequence[SecretRef]
    serves: bool


async def answer(tx: Tx, link: LinkKey, task_id: str, secrets: Secrets) -> dict[str, bytes]:
    """The values of the task's secrets, or why this link gets none."""
    named = await _named(tx, link, task_id)
    if not named.refs and not named.serves:
        return {}
    return await secrets.values(
        tx, node_id=link.node_id, allocation_id=named.allocation_id, refs=named.refs, serves=named.serves
    )


async def _named(conn: Reader, link: LinkKey, task_id: str) -> Named:
    held = await task_rows.held(conn, task_id, link.node_id)
    if held is None:
        raise SecretsRefused("this node has no such open task", task_id=task_id)
    if held.leased_by != link.link_id:
        raise NotLeased("the task is not leased to this link", task_id=task_id)
    body = msgspec.msgpack.decode(held.body, type=TaskBody)
    if body.type not in (UNIT_START, UNIT_HANDOFF):
        raise SecretsRefused(f"{body.type} has no secrets", task_id=task_id)
    kind = UnitStart if body.type == UNIT_START else UnitHandoff
    params = msgspec.msgpack.decode(body.params, type=kind)
    return Named(
        allocation_id=params.allocation_id or body.allocation_id or "",
        refs=params.secrets,
        serves=params.serving is not None,
    )

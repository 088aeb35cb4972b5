"""Makes this machine a node of its own install, through the same API as any other host."""

import asyncio
import shutil
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from penstock.kit.errors import Unavailable
from penstock.node import identity
from penstock.processes.up import leftovers
from penstock.processes.up.folder import DataFolder
from penstock.sdk.client import AsyncClient
from penstock.sdk.errors import NotFound, SdkError
from penstock.wire.rest import Node

NAME: Final = "local"
_RETIRED: Final = frozenset({"retired", "revoked"})
#: An operator may have cordoned the node before the last stop: it stays so, and that is no failure.
_AT_WORK: Final = frozenset({"ready", "cordoned", "draining"})
_READY_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Before:
    """What the agent needs to start, and the last that was heard of the node until then."""

    token: str
    heartbeat_at: datetime | None


async def prepare(client: AsyncClient, folder: DataFolder) -> Before:
    """A token for the agent when it needs one; none when its certificate still serves."""
    kept = await asyncio.to_thread(identity.load, folder.node)
    node = await _known(client, kept.node_id) if kept else None
    if kept and node is None:
        # The database does not know this node (any more): what the agent keeps for it is of no use.
        await leftovers.end_units(folder)
        await asyncio.to_thread(shutil.rmtree, folder.node)
    if node is not None and identity.usable(kept):
        return Before("", node.last_heartbeat_at)
    node = node or await _named(client)
    if node is None:
        return Before((await client.nodes.enrolment_token(NAME)).token, None)
    return Before((await client.nodes.recovery_token(node.id)).token, node.last_heartbeat_at)


async def until_ready(client: AsyncClient, before: Before) -> Node:
    """Wait until the agent has been heard of and the control plane would place work on it. The node with its GPUs."""
    last = "it has not enrolled"
    for _ in range(int(_READY_TIMEOUT_S / _POLL_S)):
        try:
            node = await _named(client)
        except SdkError as error:
            node, last = None, error.message
        if node is not None:
            heard = node.last_heartbeat_at is not None and node.last_heartbeat_at != before.heartbeat_at
            if heard and node.state in _AT_WORK and node.gpus_total > 0:
                return await client.nodes.get(node.id)
            last = f"its state is {node.state}, with {node.gpus_total} GPUs"
        await asyncio.sleep(_POLL_S)
    raise Unavailable(f"the local node was not ready after {_READY_TIMEOUT_S:.0f} s: {last}")


def simulated_gpus(node: Node) -> int:
    """How many GPUs the node pretends to have. Shares of one GPU have its index, and are one."""
    return len({gpu.index for gpu in node.gpus}) if node.simulated else 0


async def _known(client: AsyncClient, node_id: str) -> Node | None:
    try:
        node = await client.nodes.get(node_id)
    except NotFound:
        return None
    return None if node.state in _RETIRED else node


async def _named(client: AsyncClient) -> Node | None:
    async for node in client.nodes.list():
        if node.name == NAME and node.state not in _RETIRED:
            return node
    return None

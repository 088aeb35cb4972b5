"""The transaction with which a link begins: the node answers, this is its newest link, and this is what it has."""

import asyncio
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from penstock.fleet import inventory
from penstock.fleet.errors import CertificateRefused
from penstock.fleet.model import ANSWERING, RETURNS
from penstock.fleet.peer import Peer
from penstock.fleet.store import certificates
from penstock.fleet.store import links as link_rows
from penstock.fleet.store import nodes as node_rows
from penstock.fleet.store import tasks as task_rows
from penstock.fleet.store.links import LinkKey
from penstock.kit.db import Database, Tx
from penstock.kit.ids import new_id
from penstock.wire import subjects
from penstock.wire.link import Hello

#: When all nodes come back at once, so many are let in at a time; the others wait their turn.
AT_ONCE_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class Admitted:
    """The link that stands now."""

    key: LinkKey
    slots_approved: int
    at: datetime


class Admission:
    """Lets nodes in, for one gateway."""

    def __init__(self, db: Database, *, gateway_id: str, address: str) -> None:
        self._db = db
        self._gateway_id = gateway_id
        self._address = address
        self._turn = asyncio.Semaphore(AT_ONCE_MAX)

    async def admit(self, peer: Peer, hello: Hello) -> Admitted:
        """Commit the link; CertificateRefused if the node was cut off meanwhile."""
        key = LinkKey(node_id=peer.node_id, link_id=new_id("lnk"), serial=peer.serial)
        async with self._turn, self._db.transaction() as tx:
            return await self._admit(tx, key, hello)

    async def _admit(self, tx: Tx, key: LinkKey, hello: Hello) -> Admitted:
        # Whoever revokes a node locks its row first: from here on the certificate stays as it is.
        node = await node_rows.lock(tx, key.node_id)
        if node is None or not await certificates.good(tx, [key.serial]):
            raise CertificateRefused("the certificate was revoked or has expired", node_id=key.node_id)
        if node.state not in ANSWERING:
            node = await node_rows.move(tx, node, RETURNS[node.desired], "")
        await inventory.apply(tx, node, hello.inventory)
        await node_rows.describe(
            tx,
            key.node_id,
            agent_version=hello.agent_version,
            boot_id=hello.boot_id,
            production=hello.production,
            simulated=hello.inventory.simulated,
            driver_version=hello.inventory.driver_version,
            gpus_reported=len(hello.inventory.gpus),
        )
        await link_rows.upsert(tx, key, gateway_id=self._gateway_id, address=self._address)
        await task_rows.free_leases(tx, key.node_id)
        seen = await link_rows.beat(tx, [(key.node_id, key.link_id, 0.0)])
        tx.hint(subjects.node(key.node_id), key.link_id.encode())
        return Admitted(key, node.gpus_approved, seen[key.node_id])

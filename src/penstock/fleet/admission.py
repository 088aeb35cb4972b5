"""The transaction with which a link begins: the node answers, this is its newest link, and this is what it has.

When all nodes come back at once a few are let in at a time and some wait; the others are told when to come back, so
that nobody's hello takes so long that it is given up and begun anew.
"""

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
from penstock.fleet.store.links import Beat, LinkKey
from penstock.kit.db import Database, Tx
from penstock.kit.ids import new_id
from penstock.wire import subjects
from penstock.wire.link import Hello

#: So many are let in at a time.
AT_ONCE_MAX: Final = 4
#: And so many wait their turn. An agent gives its hello 15 seconds.
WAITING_MAX: Final = 400
#: With so many of them no more need come in for now.
CROWD: Final = 8 * AT_ONCE_MAX
_RETRY_S_MIN: Final = 1.0


class Busy(Exception):
    """Too many wait already."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"too many nodes connect at once; come back in {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Admitted:
    """The link that stands now."""

    key: LinkKey
    slots_approved: int
    at: datetime


class Admission:
    """Lets nodes in, for one gateway."""

    def __init__(self, db: Database, *, gateway_id: str, address: str, accepts_per_s: float) -> None:
        self._db = db
        self._gateway_id = gateway_id
        self._address = address
        self._accepts_per_s = accepts_per_s
        self._waiting = 0
        self._turn = asyncio.Semaphore(AT_ONCE_MAX)

    @property
    def crowded(self) -> bool:
        """Whether who comes now would wait for long."""
        return self._waiting >= CROWD

    async def admit(self, peer: Peer, hello: Hello) -> Admitted:
        """Commit the link; CertificateRefused if the node was cut off meanwhile, Busy if too many wait."""
        if self._waiting >= WAITING_MAX:
            raise Busy(max(_RETRY_S_MIN, self._waiting / self._accepts_per_s))
        key = LinkKey(node_id=peer.node_id, link_id=new_id("lnk"), serial=peer.serial)
        self._waiting += 1
        try:
            async with self._turn, self._db.transaction() as tx:
                return await self._admit(tx, key, hello)
        finally:
            self._waiting -= 1

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
            gpus_reported=inventory.physical(hello.inventory),
            serves_functions=hello.serves_functions,
        )
        await link_rows.upsert(tx, key, gateway_id=self._gateway_id, address=self._address)
        await task_rows.free_leases(tx, key.node_id)
        seen = await link_rows.beat(tx, [Beat(node_id=key.node_id, link_id=key.link_id)], listed=False)
        tx.hint(subjects.node(key.node_id), key.link_id.encode())
        return Admitted(key, node.gpus_approved, seen[key.node_id])

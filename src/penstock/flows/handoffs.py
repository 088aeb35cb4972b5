"""Handing a stock unit to its tenant: the task that asks the node for it, and what its answer does.

The api dispatches it in the transaction of the create, the gateway applies the answer in the transaction that takes it
over: between the two there is only the node. A saga does both again, under the same key, should either be lost.
"""

from dataclasses import dataclass

from penstock.compute.model import Allocation
from penstock.compute.service.advance import Advance
from penstock.fleet.tasks import Tasks
from penstock.kit.db import Tx
from penstock.wire import subjects
from penstock.wire.tasks import UNIT_HANDOFF, UnitHandoff


@dataclass(frozen=True, slots=True)
class Handoffs:
    """Asks (compute's Protocol `Handoffs`). The node has `expires_s` to answer."""

    tasks: Tasks
    expires_s: float

    async def dispatch(self, tx: Tx, allocation: Allocation) -> str:
        """Ask the node for it, once per fence, and return the task's id."""
        assert allocation.node_id is not None
        return await self.tasks.dispatch(
            tx,
            node_id=allocation.node_id,
            type=UNIT_HANDOFF,
            allocation_id=allocation.id,
            fence=allocation.fence,
            params=UnitHandoff(
                unit_id=allocation.unit_id,
                allocation_id=allocation.id,
                env=dict(allocation.env),
                command=list(allocation.command),
                secrets=list(allocation.secrets),
                egress=list(allocation.egress),
                serving=allocation.serving,
            ),
            dedupe_key=f"{allocation.id}/handoff/{allocation.fence}",
            expires_s=self.expires_s,
        )


@dataclass(frozen=True, slots=True)
class Answers:
    """Applies the answer (the fleet's Protocol `Handoffs`)."""

    moves: Advance

    async def ended(self, tx: Tx, *, allocation_id: str, fence: int, succeeded: bool) -> None:
        """Active at once; a failure is for the saga to deal with."""
        if succeeded:
            await self.moves.activate(tx, allocation_id, fence)
        else:
            tx.hint(subjects.allocation(allocation_id))

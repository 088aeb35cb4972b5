"""Every NATS subject, as functions. No subject is spelt anywhere else.

`evt.` carries facts, published by the relay alone. `hint.` carries "something changed, look": lossy, on core NATS.
`ask.` carries people's questions to other processes, and their answers; nothing is decided by them.
"""

from typing import Final

ALL_EVENTS: Final = "evt.>"

#: The outbox has new rows: wakes the relay.
OUTBOX: Final = "hint.outbox"
#: Capacity came back: wakes whoever places waiting requests.
CAPACITY: Final = "hint.capacity"
#: Stock was handed over, or a floor changed: wakes whoever keeps the stock.
STOCK: Final = "hint.stock"
#: Money came, or an event of a payment provider: wakes the biller.
BILLING: Final = "hint.billing"
#: Somebody has to give back what runs: wakes whoever releases it.
RELEASES: Final = "hint.releases"
#: A key, session or node was revoked: gateways look at once instead of at their next check.
REVOKED: Final = "hint.revoked"

#: Asked of the workers, which alone talk to Temporal: what an allocation's sagas did.
SAGA_HISTORY: Final = "ask.saga_history"

ALL_ALLOCATIONS: Final = "hint.allocation.*"
ALL_TASKS_DONE: Final = "hint.task.*"
ALL_NODES: Final = "hint.node.*"


def event(event_type: str) -> str:
    """Where facts of this type go."""
    return f"evt.{event_type}"


def allocation(allocation_id: str) -> str:
    """The allocation's row changed: its saga should look."""
    return f"hint.allocation.{allocation_id}"


def task_done(task_id: str) -> str:
    """The node task has a result."""
    return f"hint.task.{task_id}"


def node(node_id: str) -> str:
    """The node has tasks waiting, or its own row changed: the gateway that holds its link should look."""
    return f"hint.node.{node_id}"


def last_token(subject: str) -> str:
    """The id at the end of a hint's subject."""
    return subject.rpartition(".")[2]

"""A node's executor without a link: tasks signed here, results in a queue."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node_host import Host
from penstock.kit.ids import new_id
from penstock.node.serverclock import ServerClock
from penstock.node.tasks import Executor, Handler, Verifier
from penstock.wire.link import TaskResult
from penstock.wire.tasks import UNIT_HANDOFF, UNIT_START, UNIT_STOP, SignedTask, TaskBody, UnitHandoff

_NODE_ID = "nod_test"
#: The same in every process of a test.
_KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)


def sign(kind: str, params: msgspec.Struct, **changes: Any) -> SignedTask:
    """A good task, but for the changes."""
    values: dict[str, Any] = {
        "task_id": new_id("tsk"),
        "node_id": _NODE_ID,
        "allocation_id": None,
        "fence": 1,
        "expires_at": datetime.now(UTC) + timedelta(seconds=60),
        "correlation_id": "cor_test",
    }
    raw = msgspec.Raw(msgspec.msgpack.encode(params))
    body = msgspec.msgpack.encode(TaskBody(type=kind, params=raw, **(values | changes)))
    return SignedTask(body=body, key_id="k1", signature=_KEY.sign(body))


def sign_handoff(params: UnitHandoff, **changes: Any) -> SignedTask:
    """A handoff in the name of the allocation it is for."""
    return sign(UNIT_HANDOFF, params, **({"allocation_id": params.allocation_id} | changes))


class Desk:
    """An executor over a host's units. `values` are the secrets it can learn; None when nobody answers."""

    def __init__(
        self, host: Host, values: Mapping[str, bytes] | None = None, handlers: Mapping[str, Handler] | None = None
    ) -> None:
        self.results: asyncio.Queue[TaskResult] = asyncio.Queue()
        self._host = host
        self._clock = ServerClock()
        more: dict[str, Any] = {} if values is None else {"secrets": _answering(values)}
        self.executor = Executor(
            verifier=Verifier(_NODE_ID, lambda: {"k1": _KEY.public_key()}),
            journal=host.journal,
            clock=self._clock,
            handlers={
                UNIT_START: host.units.start,
                UNIT_STOP: host.units.stop,
                UNIT_HANDOFF: host.units.handoff,
                **(handlers or {}),
            },
            on_result=self.results.put_nowait,
            **more,
        )

    def tell_time(self, later: timedelta = timedelta()) -> None:
        """What a gateway says with its welcome."""
        self._clock.tell(datetime.now(UTC) + later)

    async def ask(self, signed: SignedTask) -> TaskResult:
        """Have a task done."""
        self.tell_time()
        self.executor.submit(signed)
        return await self.result()

    async def result(self) -> TaskResult:
        """The next one."""
        return await asyncio.wait_for(self.results.get(), 30)


def _answering(values: Mapping[str, bytes]):
    async def secrets(task_id: str) -> Mapping[str, bytes]:
        assert task_id.startswith("tsk_")
        return values

    return secrets

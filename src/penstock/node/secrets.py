"""Values of secrets, asked for over the link when a task is about to need them. They are kept nowhere.

A question is sent again on each new connection and while the gateway says that it may help; it ends after a while.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

from penstock.node.errors import Failed
from penstock.wire.link import SecretValues

#: In all, across reconnects; the task that waits for it has a time limit of its own.
TIMEOUT_S: Final = 30.0
_AGAIN_S: Final = 0.5
#: The task's lease follows the node to its new link; a gateway that lost its database or lacks a key may get it back.
_PASSING: Final = frozenset({"fleet.not_leased", "unavailable", "secrets.key_missing"})


class Secrets:
    """The questions that no gateway has answered yet."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._waiting: dict[str, asyncio.Future[Mapping[str, bytes]]] = {}
        self._fresh: asyncio.Queue[str] = asyncio.Queue()

    async def values(self, task_id: str) -> Mapping[str, bytes]:
        """What the task's secrets hold, by name; Failed when that cannot be learnt."""
        answer = self._waiting.get(task_id)
        if answer is None:
            answer = self._waiting[task_id] = asyncio.get_running_loop().create_future()
            self._fresh.put_nowait(task_id)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(answer)
        except TimeoutError as error:
            raise Failed("secrets_unavailable", f"no gateway gave the secrets within {self._timeout_s:g} s") from error
        finally:
            self._waiting.pop(task_id, None)

    def again(self) -> None:
        """Queue everything that is not answered, once: there is a new connection."""
        while not self._fresh.empty():
            self._fresh.get_nowait()
        for task_id in self._waiting:
            self._fresh.put_nowait(task_id)

    async def take(self) -> str:
        """The next task to ask for."""
        while (task_id := await self._fresh.get()) not in self._waiting:
            pass
        return task_id

    def answer(self, frame: SecretValues) -> None:
        """What a gateway said."""
        waiting = self._waiting.get(frame.task_id)
        if waiting is None or waiting.done():
            return
        if not frame.error:
            waiting.set_result(frame.values)
        elif frame.error in _PASSING:
            asyncio.get_running_loop().call_later(_AGAIN_S, self._fresh.put_nowait, frame.task_id)
        else:
            waiting.set_exception(Failed("secrets_refused", f"the gateway gave no secrets: {frame.error}"))

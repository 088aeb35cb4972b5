"""A bounded queue for each of many senders, emptied in turn: one sender's flood fills its own queue and no other's."""

import asyncio
from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """At most `each_max` items of a sender and `total_max` of all wait here."""

    def __init__(self, *, each_max: int, total_max: int) -> None:
        self._each_max = each_max
        self._total_max = total_max
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        self._total = 0
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return self._total

    def put(self, sender: str, item: T) -> bool:
        """Add an item; whether there was room. A full queue has room for a sender that has nothing in it."""
        mine = self._waiting.get(sender)
        if mine is not None and (len(mine) >= self._each_max or self._total >= self._total_max):
            return False
        if mine is None:
            mine = self._waiting[sender] = deque()
        mine.append(item)
        self._total += 1
        self._arrived.set()
        return True

    async def take(self) -> T:
        """The oldest item of the sender whose turn it is."""
        while not self._total:
            self._arrived.clear()
            await self._arrived.wait()
        sender, mine = self._waiting.popitem(last=False)
        item = mine.popleft()
        if mine:
            self._waiting[sender] = mine
        self._total -= 1
        return item

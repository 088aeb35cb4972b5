"""A bounded queue for each of many senders, emptied in turn: one sender's flood fills its own queue and no other's."""

import asyncio
from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """At most `each_max` items of a sender and `total_max` of all wait here, with at most `each_bytes_max` of one."""

    def __init__(self, *, each_max: int, total_max: int, each_bytes_max: int) -> None:
        self._each_max = each_max
        self._total_max = total_max
        self._each_bytes_max = each_bytes_max
        self._waiting: OrderedDict[str, deque[tuple[T, int]]] = OrderedDict()
        self._bytes: Counter[str] = Counter()
        self._total = 0
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return self._total

    def put(self, sender: str, item: T, size: int) -> bool:
        """Add an item of so many bytes; whether there was room. A full queue has room for a sender that has nothing in
        it."""
        mine = self._waiting.get(sender)
        if mine is not None and (
            len(mine) >= self._each_max
            or self._total >= self._total_max
            or self._bytes[sender] + size > self._each_bytes_max
        ):
            return False
        if mine is None:
            mine = self._waiting[sender] = deque()
        mine.append((item, size))
        self._bytes[sender] += size
        self._total += 1
        self._arrived.set()
        return True

    async def take(self) -> T:
        """The oldest item of the sender whose turn it is."""
        while not self._total:
            self._arrived.clear()
            await self._arrived.wait()
        sender, mine = self._waiting.popitem(last=False)
        item, size = mine.popleft()
        self._bytes[sender] -= size
        if mine:
            self._waiting[sender] = mine
        else:
            del self._bytes[sender]
        self._total -= 1
        return item

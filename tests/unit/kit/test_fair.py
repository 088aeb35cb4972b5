"""Senders take turns, and one that sends too much fills its own queue alone."""

import asyncio

from penstock.kit.fair import FairQueue


async def test_senders_take_turns() -> None:
    queue: FairQueue[str] = FairQueue(each_max=10, total_max=100)
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        assert queue.put(item[0], item)
    assert [await queue.take() for _ in range(6)] == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert len(queue) == 0


async def test_a_flood_is_refused_and_others_have_room() -> None:
    queue: FairQueue[int] = FairQueue(each_max=3, total_max=4)
    assert [queue.put("flood", n) for n in range(5)] == [True, True, True, False, False]
    assert queue.put("b", 1)
    assert not queue.put("b", 2)
    assert queue.put("c", 1)


async def test_who_takes_from_an_empty_queue_waits() -> None:
    queue: FairQueue[int] = FairQueue(each_max=1, total_max=1)
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    assert not taking.done()
    queue.put("a", 7)
    assert await taking == 7

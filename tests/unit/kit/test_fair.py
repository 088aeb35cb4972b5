"""Senders take turns, and one that sends too much fills its own queue alone."""

import asyncio

from penstock.kit.fair import FairQueue


async def test_senders_take_turns() -> None:
    queue: FairQueue[str] = FairQueue(each_max=10, total_max=100, each_bytes_max=100)
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        assert queue.put(item[0], item, 1)
    assert [await queue.take() for _ in range(6)] == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert len(queue) == 0


async def test_a_flood_is_refused_and_others_have_room() -> None:
    queue: FairQueue[int] = FairQueue(each_max=3, total_max=4, each_bytes_max=100)
    assert [queue.put("flood", n, 1) for n in range(5)] == [True, True, True, False, False]
    assert queue.put("b", 1, 1)
    assert not queue.put("b", 2, 1)
    assert queue.put("c", 1, 1)


async def test_who_takes_from_an_empty_queue_waits() -> None:
    queue: FairQueue[int] = FairQueue(each_max=1, total_max=1, each_bytes_max=100)
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    assert not taking.done()
    queue.put("a", 7, 1)
    assert await taking == 7


async def test_the_bytes_of_one_sender_are_bounded_and_come_back_when_they_were_taken() -> None:
    queue: FairQueue[str] = FairQueue(each_max=10, total_max=100, each_bytes_max=100)
    assert [queue.put("flood", "large", 60) for _ in range(3)] == [True, False, False]
    assert queue.put("b", "larger than anybody may have, and alone", 1000)
    assert queue.put("flood", "small", 40)
    assert [await queue.take() for _ in range(2)] == ["large", "larger than anybody may have, and alone"]
    assert queue.put("flood", "large", 60)

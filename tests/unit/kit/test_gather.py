"""Batches: who comes together is served together."""

import asyncio
from collections.abc import Sequence

import pytest

from penstock.kit.gather import Gatherer


class Work:
    """Doubles numbers, and remembers in which batches they came; `hold` keeps it from going on."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def __call__(self, items: Sequence[int]) -> list[int | BaseException]:
        self.batches.append(list(items))
        await self.go_on.wait()
        return [ValueError(str(item)) if item < 0 else 2 * item for item in items]


async def test_what_comes_in_one_turn_is_done_together() -> None:
    work = Work()
    gatherer = Gatherer(work, batch_max=100, at_once=2)
    assert await asyncio.gather(*(gatherer.do(number) for number in range(5))) == [0, 2, 4, 6, 8]
    assert work.batches == [[0, 1, 2, 3, 4]]
    assert await gatherer.do(7) == 14


async def test_no_batch_is_larger_than_the_most_and_no_more_run_than_may() -> None:
    work = Work()
    work.go_on.clear()
    gatherer = Gatherer(work, batch_max=2, at_once=2)
    asked = [asyncio.create_task(gatherer.do(number)) for number in range(7)]
    await asyncio.sleep(0.01)
    assert work.batches == [[0, 1], [2, 3]]
    work.go_on.set()
    assert await asyncio.gather(*asked) == [0, 2, 4, 6, 8, 10, 12]
    assert work.batches == [[0, 1], [2, 3], [4, 5], [6]]


async def test_an_answer_that_is_an_exception_is_its_own_callers() -> None:
    gatherer = Gatherer(Work(), batch_max=100)
    answers = await asyncio.gather(*(gatherer.do(number) for number in (1, -2, 3)), return_exceptions=True)
    assert (answers[0], str(answers[1]), answers[2]) == (2, "-2", 6)


async def test_work_that_fails_fails_for_all_and_the_next_is_done() -> None:
    broken = True

    async def work(items: Sequence[int]) -> Sequence[int]:
        if broken:
            raise OSError("away")
        return items

    gatherer = Gatherer(work, batch_max=100)
    answers = await asyncio.gather(*(gatherer.do(number) for number in range(3)), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["away"] * 3
    broken = False
    assert await gatherer.do(1) == 1


async def test_a_caller_who_leaves_disturbs_nobody() -> None:
    work = Work()
    work.go_on.clear()
    gatherer = Gatherer(work, batch_max=100)
    leaving, staying = (asyncio.create_task(gatherer.do(number)) for number in (1, 2))
    await asyncio.sleep(0.01)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    work.go_on.set()
    assert await staying == 4

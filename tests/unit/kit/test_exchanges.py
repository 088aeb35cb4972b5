"""Exchanges of callers whose credential is revoked while they wait."""

import asyncio

import pytest

from penstock.kit.caller import Caller
from penstock.kit.errors import Unauthenticated
from penstock.kit.exchanges import Exchange, Exchanges


def _caller(name: str) -> Caller:
    return Caller(
        principal_id=name,
        principal_kind="user",
        display_name=name,
        organisation_id="org",
        project_id="prj",
        role="member",
        actions=frozenset(),
    )


async def _never() -> None:
    await asyncio.Event().wait()


async def test_a_check_that_fails_for_one_caller_still_ends_the_others_revoked_exchange() -> None:
    async def still_valid(caller: Caller) -> bool:
        if caller.principal_id == "unknown":
            raise ConnectionError("the database is away")
        return caller.principal_id != "revoked"

    exchanges = Exchanges(still_valid)
    names = ("unknown", "revoked", "valid")

    async def wait(name: str) -> None:
        with exchanges.begin(lambda: _caller(name)) as exchange:
            await exchange.wait(_never)

    tasks = {name: asyncio.create_task(wait(name)) for name in names}
    await asyncio.sleep(0)
    await exchanges.recheck()
    with pytest.raises(Unauthenticated):
        await asyncio.wait_for(tasks["revoked"], 5)
    assert not tasks["unknown"].done()
    assert not tasks["valid"].done()
    for task in tasks.values():
        task.cancel()


async def test_callers_are_checked_together_each_once() -> None:
    asked: list[str] = []
    both = asyncio.Event()

    async def still_valid(caller: Caller) -> bool:
        asked.append(caller.principal_id)
        if len(asked) == 2:
            both.set()
        await asyncio.wait_for(both.wait(), 5)
        return True

    exchanges = Exchanges(still_valid)
    one, two = _caller("one"), _caller("two")
    with exchanges.begin(lambda: one) as a, exchanges.begin(lambda: one) as b, exchanges.begin(lambda: two) as c:
        for each in (a, b, c):
            await each.wait(_done)
        await exchanges.recheck()
    assert sorted(asked) == ["one", "two"]
    assert not _any_revoked(a, b, c)


async def _done() -> None:
    return None


def _any_revoked(*exchanges: Exchange) -> bool:
    return any(each.revoked for each in exchanges)

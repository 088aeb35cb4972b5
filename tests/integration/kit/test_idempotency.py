"""One effect per key, whatever races."""

import asyncio

import pytest

from penstock.kit import idempotency
from penstock.kit.db import Database, Tx
from penstock.kit.errors import Invalid
from penstock.kit.idempotency import InProgress, KeyReused, Once


def once(body: bytes = b"{}", key: str = "k1") -> Once:
    return Once.of(scope="prj_a", key=key, operation="create", body=body)


async def test_fifty_racers_have_one_effect_and_one_answer(database: Database) -> None:
    effects = 0

    async def effect(tx: Tx) -> bytes:
        nonlocal effects
        effects += 1
        return b"answer %d" % effects

    answers = await asyncio.gather(*(idempotency.run(database, once(), effect) for _ in range(50)))
    assert set(answers) == {b"answer 1"}
    assert effects == 1


async def test_another_body_under_the_same_key_is_refused(database: Database) -> None:
    async def effect(tx: Tx) -> bytes:
        return b"done"

    await idempotency.run(database, once(), effect)
    with pytest.raises(KeyReused):
        await idempotency.run(database, once(b'{"other": 1}'), effect)


async def test_a_failed_effect_leaves_the_key_free(database: Database) -> None:
    async def fail(tx: Tx) -> bytes:
        raise Invalid("no")

    async def succeed(tx: Tx) -> bytes:
        return b"done"

    with pytest.raises(Invalid):
        await idempotency.run(database, once(), fail)
    assert await idempotency.run(database, once(), succeed) == b"done"


async def test_a_call_that_is_still_running_is_said_to_be(database: Database) -> None:
    release = asyncio.Event()

    async def slow(tx: Tx) -> bytes:
        await release.wait()
        return b"slow"

    first = asyncio.create_task(idempotency.run(database, once(), slow))
    await asyncio.sleep(0.2)
    with pytest.raises(InProgress) as caught:
        await idempotency.run(database, once(), slow)
    assert caught.value.retry_after_s == 1
    release.set()
    assert await first == b"slow"


@pytest.mark.parametrize("key", ["", "x" * 256, "caf\u00e9", "a b", "tab\t"])
def test_a_bad_key_is_refused(key: str) -> None:
    with pytest.raises(Invalid, match="255 printable ASCII"):
        once(key=key)

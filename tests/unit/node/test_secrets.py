"""Questions for secrets: asked on every connection until answered, and never for ever."""

import asyncio

import pytest

from penstock.node import secrets as module
from penstock.node.errors import Failed
from penstock.node.secrets import Secrets
from penstock.wire.link import SecretValues


async def test_an_answer_ends_the_question() -> None:
    secrets = Secrets()
    asking = asyncio.create_task(secrets.values("tsk_1"))
    assert await secrets.take() == "tsk_1"
    secrets.answer(SecretValues(task_id="tsk_2", values={"a": b"not mine"}))
    secrets.answer(SecretValues(task_id="tsk_1", values={"a": b"1"}))
    assert await asking == {"a": b"1"}
    secrets.answer(SecretValues(task_id="tsk_1", values={"a": b"late"}))


async def test_an_open_question_goes_over_the_next_connection_too() -> None:
    secrets = Secrets()
    asking = asyncio.create_task(secrets.values("tsk_1"))
    await secrets.take()
    secrets.again()
    assert await secrets.take() == "tsk_1"
    secrets.answer(SecretValues(task_id="tsk_1"))
    assert await asking == {}
    secrets.again()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(secrets.take(), 0.05)


async def test_what_may_pass_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    secrets = Secrets()
    asking = asyncio.create_task(secrets.values("tsk_1"))
    await secrets.take()
    secrets.answer(SecretValues(task_id="tsk_1", error="fleet.not_leased"))
    assert await asyncio.wait_for(secrets.take(), 30) == "tsk_1"
    secrets.answer(SecretValues(task_id="tsk_1", values={"a": b"1"}))
    assert await asking == {"a": b"1"}


async def test_a_refusal_fails_the_task_at_once() -> None:
    secrets = Secrets()
    asking = asyncio.create_task(secrets.values("tsk_1"))
    await secrets.take()
    secrets.answer(SecretValues(task_id="tsk_1", error="fleet.secrets_refused"))
    with pytest.raises(Failed, match="secrets_refused"):
        await asking


async def test_a_gateway_that_never_answers_ends_in_a_failure() -> None:
    secrets = Secrets(timeout_s=0.05)
    with pytest.raises(Failed) as caught:
        await secrets.values("tsk_1")
    assert caught.value.code == "secrets_unavailable"

"""One effect per Idempotency-Key, through the running api."""

import asyncio

import asyncpg

from .conftest import Api, People


async def test_fifty_racers_with_one_key_have_one_effect_and_one_answer(api: Api) -> None:
    headers = {"Idempotency-Key": "fifty-racers"}
    answers = await asyncio.gather(
        *(api.call("POST", "/projects", json={"name": "raced"}, headers=headers) for _ in range(50))
    )
    assert {answer.status for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    conn = await asyncpg.connect(api.database_url)
    assert await conn.fetchval("select count(*) from identity.projects where name = 'raced'") == 1
    await conn.close()


async def test_another_body_under_the_same_key_is_refused(api: Api) -> None:
    headers = {"Idempotency-Key": "two-bodies"}
    assert (await api.call("POST", "/projects", json={"name": "one"}, headers=headers)).status == 201
    answer = await api.call("POST", "/projects", json={"name": "two"}, headers=headers)
    assert answer.status == 409
    assert answer.error["code"] == "idempotency_key_reused"


async def test_the_same_key_of_another_caller_is_another_key(api: Api, people: People) -> None:
    headers = {"Idempotency-Key": "shared"}
    body = {"name": "mine", "role": "viewer"}
    mine = await api.call("POST", "/service-accounts", key=people.owner.key, json=body, headers=headers)
    theirs = await api.call("POST", "/service-accounts", key=people.stranger.key, json=body, headers=headers)
    assert mine.status == theirs.status == 201
    assert mine.json["id"] != theirs.json["id"]


async def test_repeated_key_creation_shows_the_same_secret_and_keeps_it_sealed(api: Api, people: People) -> None:
    headers = {"Idempotency-Key": "secretive"}
    body = {"name": "repeatable", "role": "viewer"}
    first = await api.call("POST", "/keys", key=people.owner.key, json=body, headers=headers)
    second = await api.call("POST", "/keys", key=people.owner.key, json=body, headers=headers)
    assert first.status == 201
    assert first.content == second.content
    assert (await api.call("GET", "/whoami", key=first.json["secret"])).json["role"] == "viewer"
    conn = await asyncpg.connect(api.database_url)
    kept = await conn.fetchval("select response from kit.idempotency where key = 'secretive'")
    await conn.close()
    assert first.json["secret"].encode() not in kept


async def test_refusals_are_not_kept(api: Api) -> None:
    headers = {"Idempotency-Key": "refused-first"}
    body = {"name": "n", "organisation_id": "org_" + "0" * 26}
    assert (await api.call("POST", "/projects", json=body, headers=headers)).status == 404
    assert (await api.call("POST", "/projects", json={"name": "kept"}, headers=headers)).status == 201

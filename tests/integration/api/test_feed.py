"""Events: past and live, none missed, none of others."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import asyncpg

from penstock.kit import feed
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.kit.feed import EventFilter
from penstock.kit.outbox import Event, append
from penstock.wire.catalogue import CATALOGUE

from .conftest import Api, People, made, person


class Stream:
    """A client of the live stream."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    async def next(self, *, timeout_s: float = 30.0) -> dict[str, str]:
        """The next event's fields; comments are skipped."""
        async with asyncio.timeout(timeout_s):
            while True:
                fields: dict[str, str] = {}
                while line := (await self._line()):
                    name, _, value = line.partition(": ")
                    fields[name] = value
                if "data" in fields:
                    return fields

    async def _line(self) -> str:
        line = await self.response.content.readline()
        if not line:
            raise EOFError
        return line.decode().rstrip("\n")


@asynccontextmanager
async def follow(api: Api, key: str, *, query: str = "", **headers: str) -> AsyncIterator[Stream]:
    """Open the stream and wait until the server has said that it stands."""
    sent = {"Authorization": f"Bearer {key}", **headers}
    url = f"http://127.0.0.1:{api.port}/api/v1/events/stream{query}"
    async with aiohttp.ClientSession() as session, session.get(url, headers=sent) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert await response.content.readline() == b": connected\n"
        yield Stream(response)


async def add_account(api: Api, key: str, name: str) -> str:
    answer = await api.call("POST", "/service-accounts", key=key, json={"name": name, "role": "viewer"})
    assert answer.status == 201
    return answer.json["id"]


async def test_live_events_arrive_in_order_and_resume_after_the_last_seen(api: Api, people: People) -> None:
    async with follow(api, people.viewer.key) as stream:
        first = await add_account(api, people.owner.key, "one")
        second = await add_account(api, people.owner.key, "two")
        seen = [json.loads((await stream.next())["data"]) for _ in range(2)]
    assert [event["payload"]["principal_id"] for event in seen] == [first, second]
    third = await add_account(api, people.owner.key, "three")
    resumed = {"Last-Event-ID": seen[0]["cursor"]}
    async with follow(api, people.viewer.key, **resumed) as stream:
        again = [json.loads((await stream.next())["data"]) for _ in range(2)]
    assert [event["payload"]["principal_id"] for event in again] == [second, third]
    async with follow(api, people.viewer.key, query=f"?after={seen[1]['cursor']}") as stream:
        fields = await stream.next()
    assert json.loads(fields["data"])["payload"]["principal_id"] == third
    assert fields["id"] == json.loads(fields["data"])["cursor"]
    assert fields["event"] == "identity.service_account_created"


async def test_a_damaged_position_is_refused(api: Api, people: People) -> None:
    answer = await api.call("GET", "/events/stream", key=people.viewer.key, headers={"Last-Event-ID": "nonsense"})
    assert answer.status == 400
    assert answer.error["message"] == "invalid cursor"


async def test_the_stream_of_a_revoked_key_ends_within_five_seconds(api: Api, people: People) -> None:
    doomed = await person(api, people.owner.project_id, "viewer")
    async with follow(api, doomed.key) as stream:
        started = time.monotonic()
        home = {"Penstock-Project": doomed.project_id}
        assert (await api.call("DELETE", f"/keys/{doomed.key_id}", headers=home)).status == 204
        try:
            async with asyncio.timeout(6):
                while True:
                    await stream.next(timeout_s=6)
        except EOFError:
            pass
        assert time.monotonic() - started < 5
    assert (await api.call("GET", "/whoami", key=doomed.key)).status == 401


async def test_past_events_are_paged_and_filtered(api: Api, people: People) -> None:
    account = await add_account(api, people.stranger.key, "paged")
    listed: list[dict[str, Any]] = []
    cursor = ""
    while True:
        page = (await api.call("GET", f"/events?limit=2{cursor}", key=people.stranger.key)).json
        listed += page["items"]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    newest = (await api.call("GET", "/events?limit=200&order=desc", key=people.stranger.key)).json["items"]
    assert [event["event_id"] for event in newest] == [event["event_id"] for event in reversed(listed)]
    assert newest[0]["payload"]["principal_id"] == account
    filtered = await api.call("GET", "/events?event_type=identity.key_created&limit=200", key=people.stranger.key)
    assert {event["event_type"] for event in filtered.json["items"]} == {"identity.key_created"}


async def test_the_audit_log_says_who_did_what(api: Api, people: People) -> None:
    headers = {"X-Correlation-Id": "ticket-4711"}
    body = {"name": "audited", "role": "viewer"}
    answer = await api.call("POST", "/service-accounts", key=people.owner.key, json=body, headers=headers)
    assert answer.headers["x-correlation-id"] == "ticket-4711"
    found = (await api.call("GET", "/audit?correlation_id=ticket-4711", key=people.owner.key)).json["items"]
    assert [(row["action"], row["target_id"]) for row in found] == [
        ("identity.service_account_created", answer.json["id"])
    ]
    by_target = (await api.call("GET", f"/audit?target_id={answer.json['id']}", key=people.owner.key)).json["items"]
    assert by_target == found
    page = (await api.call("GET", "/audit?limit=1", key=people.owner.key)).json
    older = (await api.call("GET", f"/audit?limit=1&cursor={page['next_cursor']}", key=people.owner.key)).json
    assert older["items"][0]["id"] < page["items"][0]["id"]


async def test_operators_handle_dead_letters(api: Api) -> None:
    project = await made(api, "/projects", {"name": "poisoned"})
    conn = await asyncpg.connect(api.database_url)
    kill = "update kit.waiting set dead = true, attempts = 5, last_error = 'refused' where aggregate_id = $1"
    await conn.execute(kill, project["id"])
    listed = (await api.call("GET", "/dead-letters")).json["items"]
    letter = next(each for each in listed if each["aggregate_id"] == project["id"])
    assert letter["last_error"] == "refused"
    assert (await api.call("POST", f"/dead-letters/{letter['event_id']}/requeue")).status == 204
    assert (await api.call("POST", f"/dead-letters/{letter['event_id']}/requeue")).status == 404
    await conn.execute(kill, project["id"])
    assert (await api.call("DELETE", f"/dead-letters/{letter['event_id']}")).status == 204
    waiting = await conn.fetchval("select count(*) from kit.waiting where aggregate_id = $1", project["id"])
    await conn.close()
    assert waiting == 0


async def test_every_event_is_as_the_catalogue_says(api: Api, people: People) -> None:
    conn = await asyncpg.connect(api.database_url)
    rows = await conn.fetch("select type, payload::text as payload from kit.outbox")
    await conn.close()
    assert len(rows) > 20
    for row in rows:
        declared = set(CATALOGUE[row["type"]].__struct_fields__)
        assert set(json.loads(row["payload"])) == declared, row["type"]


def _caller(project_id: str) -> Caller:
    return Caller(
        principal_id="usr_default",
        principal_kind="user",
        display_name="d",
        organisation_id="org_default",
        project_id=project_id,
        role="owner",
        actions=frozenset({"events.read"}),
    )


def _event(aggregate_id: str) -> Event:
    return Event(
        type="identity.key_created",
        aggregate_id=aggregate_id,
        version=1,
        organisation_id="org_default",
        project_id="prj_default",
        payload={},
    )


async def test_an_event_that_commits_late_is_not_missed(database: Database, database_url: str) -> None:
    """The transaction that took its number first commits last; a reader in between must wait for it."""

    async def read(after: tuple[int, int]) -> list[str]:
        async with database.read() as conn:
            found = await feed.read_events(conn, _caller("prj_default"), EventFilter(), after, 10)
        return [event.aggregate_id for event in found]

    slow = await asyncpg.connect(database_url)
    transaction = slow.transaction()
    await transaction.start()
    await slow.execute(
        "insert into kit.outbox (event_id, type, aggregate_id, version, project_id, correlation_id, payload)"
        " values ('evt_slow', 'identity.key_created', 'slow', 1, 'prj_default', 'c', '{}')"
    )
    async with database.transaction() as tx:
        await append(tx, _event("quick"))
    assert await read(feed.START) == []
    await transaction.commit()
    await slow.close()
    assert await read(feed.START) == ["slow", "quick"]


async def test_transactions_are_ordered_as_numbers_not_as_text(database: Database) -> None:
    async with database.transaction() as tx:
        for name, number in (("second", "10"), ("first", "9"), ("third", "100")):
            await append(tx, _event(name))
            await tx.execute("update kit.outbox set tx = $1::text::xid8 where aggregate_id = $2", number, name)
    async with database.read() as conn:
        found = await feed.read_events(conn, _caller("prj_default"), EventFilter(), feed.START, 10)
    assert [event.aggregate_id for event in found] == ["first", "second", "third"]

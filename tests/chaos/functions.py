"""What must hold of functions, during a storm and after it: read from the rows, from every change that they went
through (a trigger of ours keeps them), from the results that passed by, and from what callers were told."""

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg
import msgspec
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from chaos.callers import POISON, Asked
from chaos.invariants import setting
from e2e.cloud import Cloud
from penstock.kit import bus
from penstock.kit.bus import Bus
from penstock.serverless.model import FINAL, LOST_MAX, MOVES
from penstock.wire import subjects
from penstock.wire.serverless import FailureClass, InvocationResultMessage

RETRIES = 2
_DEADLINE_S = 120
#: The last one is what asyncpg says of a connection that is cut while it begins.
_AWAY = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
_LOOK_S = 0.2
#: A result that came passes by once more after this time, with a header of ours.
_LATER_S = (0.1, 1.0)
_AGAIN = "Chaos-Again"
#: Every change of every invocation, in order.
_RECORD = """
create schema chaos;
create table chaos.moves (n bigint generated always as identity, id text, was text, now text, attempts int,
    after_end boolean);
create function chaos.record() returns trigger language plpgsql as $$ begin
    insert into chaos.moves (id, was, now, attempts, after_end)
    values (new.id, old.state, new.state, new.attempt - coalesce(old.attempt, 0), old.finished_at is not null);
    return null;
end $$;
create trigger chaos_record after insert or update on serverless.invocations
    for each row execute function chaos.record();
"""
_ROWS = """
select id, state, function_name, attempt, lost, tries, token, status_code, result, failure_class, error, error_type
from serverless.invocations
"""
#: At any moment, of one snapshot: slots that are counted as taken, and attempts that are open.
_MISCOUNTED = """
select w.id, w.state, w.slots, w.inflight, o.open from serverless.workers w cross join lateral (
    select count(*) as open from serverless.invocations i where i.worker_id = w.id and i.finished_at is null) o
where w.inflight <> o.open or w.inflight > w.slots or (w.state = 'gone' and o.open > 0)
"""
_CROWDED = """
select f.name, v.workers_max, count(*) from serverless.workers w join serverless.functions f on f.id = w.function_id
join serverless.versions v on v.function_id = f.id and v.number = f.current_version
where w.state in ('starting', 'ready') group by 1, 2 having count(*) > v.workers_max
"""
#: Those that a worker said the last word about.
_UNMETERED = """
select (select count(*) from serverless.invocations where finished_at is not null and token is not null) as ran,
    (select coalesce(sum(invocations), 0) from serverless.spent)
    + (select coalesce(sum(quantity), 0) from billing.recorded where meter = 'function.invocations') as metered
"""
_WORKERS = """
select id, state, reason, slots, inflight, created_at, ready_at, lease_until, allocation_id from serverless.workers
where state <> 'gone'
"""
_OPEN = """
select id, state, waiting, due_at, attempt, lost, tries, worker_id, dispatched_at from serverless.invocations
where finished_at is null limit 50
"""
_BUSIEST = """
select a.unit_id from serverless.workers w join compute.allocations a on a.id = w.allocation_id
where w.state = 'ready' and w.request = 'storm-work' and w.inflight > 0 order by w.inflight desc, w.id limit 1
"""


@asynccontextmanager
async def watch(cloud: Cloud) -> AsyncIterator["Watch"]:
    """From now on."""
    url = setting(cloud, "PENSTOCK_DATABASE_URL")
    async with bus.connect(setting(cloud, "PENSTOCK_NATS_URL"), name="watch") as connected:
        watching = Watch(cloud, url, connected)
        await watching.query(_RECORD)
        await connected.client.subscribe(subjects.RESULTS, cb=watching.passed_by)
        looking = asyncio.create_task(watching.look())
        try:
            yield watching
            assert not looking.done(), f"nobody looked any more: {looking.exception()!r}"
        finally:
            await watching.close(looking)


class Watch:
    """Looks at an install the whole time, through its breakdowns."""

    def __init__(self, cloud: Cloud, url: str, connected: Bus) -> None:
        self.bus = connected
        self.results: dict[str, list[InvocationResultMessage]] = defaultdict(list)
        self.amiss: list[str] = []
        self.looks = self.repeated = 0
        self._repeating: set[asyncio.Task[None]] = set()
        self._cloud = cloud
        self._url = url

    async def passed_by(self, message: Msg) -> None:
        """A result, whoever commits it. It comes again a little later, when another attempt may be under way."""
        if _AGAIN in (message.headers or {}):
            return
        result = msgspec.json.decode(message.data, type=InvocationResultMessage)
        self.results[result.invocationID].append(result)
        again = asyncio.create_task(self._deliver_again(message))
        self._repeating.add(again)
        again.add_done_callback(self._repeating.discard)

    async def _deliver_again(self, message: Msg) -> None:
        await asyncio.sleep(random.uniform(*_LATER_S))
        with suppress(NatsError, OSError):
            await self.bus.client.publish(message.subject, message.data, headers={_AGAIN: "1"})
            self.repeated += 1

    async def query(self, query: str) -> list[Any]:
        """As soon as Postgres answers."""
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            try:
                conn = await asyncpg.connect(self._url, timeout=10)
                try:
                    return (
                        await conn.fetch(query, timeout=20)
                        if query.lstrip()[:6] == "select"
                        else [await conn.execute(query)]
                    )
                finally:
                    await conn.close(timeout=5)
            except _AWAY:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)

    async def close(self, *tasks: "asyncio.Task[None]") -> None:
        """Look no more."""
        for task in (*tasks, *self._repeating):
            task.cancel()
        await asyncio.gather(*tasks, *self._repeating, return_exceptions=True)

    async def look(self) -> None:
        """What may never be seen, not for a moment."""
        while True:
            for query in (_MISCOUNTED, _CROWDED):
                self.amiss += [repr(row) for row in await self.query(query)]
            self.looks += 1
            await asyncio.sleep(_LOOK_S)

    async def busy_unit(self) -> str:
        """The unit of a worker that has something in hand."""
        deadline = time.monotonic() + _DEADLINE_S
        while not (found := await self.query(_BUSIEST)):
            assert time.monotonic() < deadline, f"no worker is busy\n{await self._standing()}"
            await asyncio.sleep(0.05)
        return found[0][0]

    async def until_rest(self) -> None:
        """Nothing is open any more."""
        await self._until(
            "select id, state, waiting, attempt, worker_id from serverless.invocations where finished_at is null"
        )

    async def workers_are_gone(self) -> None:
        """All were idle for long enough."""
        await self._until(
            "select id, state, reason, inflight from serverless.workers where state <> 'gone' or inflight > 0"
        )

    async def _until(self, query: str) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while left := await self.query(query):
            assert time.monotonic() < deadline, f"{left[:10]}\n{await self._standing()}"
            await asyncio.sleep(0.2)

    async def _standing(self) -> str:
        """What is open, and the logs, for a failure's message."""
        open_ = [*await self.query(_WORKERS), *await self.query(_OPEN)]
        return "\n".join([*map(repr, open_), self._cloud.logs(6000)])

    async def rows(self) -> dict[str, Any]:
        """All invocations."""
        return {row["id"]: row for row in await self.query(_ROWS)}

    async def each_ended_once(self) -> None:
        """Every change was a legal one, an attempt at most, and none came after the end."""
        legal = {(None, "queued"), *((was, now) for (was, _), now in MOVES.items())}
        ends: Counter[str] = Counter()
        for move in await self.query("select * from chaos.moves order by n"):
            assert not move["after_end"], move
            assert move["was"] == move["now"] or (move["was"], move["now"]) in legal, move
            assert move["attempts"] in (0, 1), move
            ends[move["id"]] += move["now"] in FINAL
        assert ends
        assert set(ends.values()) == {1}, [(each, count) for each, count in ends.items() if count != 1][:10]

    async def nothing_was_seen_amiss(self) -> None:
        """No worker too many, no slot counted that nothing takes."""
        assert self.looks > 10
        assert self.amiss == []

    async def poison_is_buried(self) -> None:
        """Each has its dead letter, and nothing else has one."""
        letters = await self.query("select invocation_id, failure_class, function_name from serverless.dead_letters")
        given_up = {row["id"] for row in (await self.rows()).values() if row["state"] == "dead_lettered"}
        assert sorted(letter["invocation_id"] for letter in letters) == sorted(given_up)
        assert {(letter["failure_class"], letter["function_name"]) for letter in letters} <= {
            ("retry_exhausted", POISON)
        }

    async def every_run_is_metered(self) -> None:
        """Once, wherever the fact is by now."""
        deadline = time.monotonic() + _DEADLINE_S
        while (found := (await self.query(_UNMETERED))[0])["ran"] != found["metered"]:
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.5)


def nothing_was_lost(rows: Mapping[str, Any], asked: Mapping[str, Asked]) -> None:
    """Whatever a caller has an acknowledgement for is there and ended; and nothing is there that nobody asked for."""
    assert all(each.acknowledged for each in asked.values())
    assert set(rows) == set(asked)
    assert {row["state"] for row in rows.values()} <= set(FINAL)


def ends_are_as_the_work_was(rows: Mapping[str, Any], asked: Mapping[str, Asked]) -> None:
    """The last attempt's word, and no other's, is what was kept; what is not poison was never given up."""
    for invocation_id, row in rows.items():
        do = asked[invocation_id].payload.get("do", "poison")
        assert row["attempt"] == row["lost"] + row["tries"], row
        if do == "poison":
            assert (row["state"], row["attempt"], row["lost"]) == ("dead_lettered", LOST_MAX, LOST_MAX), row
            assert row["failure_class"] == "retry_exhausted"
        elif do == "fail":
            assert (row["state"], row["failure_class"], row["tries"]) == ("failed", "handler_error", RETRIES + 1), row
            assert row["error"].endswith(f"{invocation_id} {row['attempt']}"), row
        else:
            assert row["state"] == "succeeded", row
            assert json.loads(row["result"]) == {"id": invocation_id, "attempt": row["attempt"], "do": do}
        assert do == "poison" or (row["lost"] < LOST_MAX and row["tries"] <= RETRIES + 1), row


def callers_were_told_the_rows(rows: Mapping[str, Any], asked: Mapping[str, Asked]) -> None:
    """However often they asked."""
    assert any(each.ends for each in asked.values())
    for invocation_id, each in asked.items():
        row = rows[invocation_id]
        for state, status, body in each.ends:
            assert state == row["state"], (row, body)
            if state == "succeeded":
                assert (status, body) == (row["status_code"], json.loads(row["result"]))
            else:
                assert (body["error"]["code"], body["error"]["message"]) == (row["failure_class"], row["error"])


def one_result_counted(rows: Mapping[str, Any], results: Mapping[str, list[InvocationResultMessage]]) -> None:
    """Of all results of an invocation, at most one has the token that counted; and it is what was kept. One that was
    called off says nothing: a dispatch may come again after its end."""
    assert results
    for invocation_id, seen in results.items():
        row = rows[invocation_id]
        counted = {
            bytes(each.body): each
            for each in seen
            if each.token
            and bytes.fromhex(each.token) == row["token"]
            and (each.failureClass is not FailureClass.CANCELLED or row["state"] == "cancelled")
        }
        assert len(counted) <= 1, (row, seen)
        for body, each in counted.items():
            assert each.attempt == row["attempt"]
            assert row["state"] != "succeeded" or body == row["result"]


def described(rows: Mapping[str, Any], watched: Watch) -> str:
    """How it went, in a line."""
    late = [
        each
        for invocation_id, seen in watched.results.items()
        for each in seen
        if each.token and each.attempt < rows[invocation_id]["attempt"] and each.state == "succeeded"
    ]
    states = Counter(str(row["state"]) for row in rows.values())
    again = sum(row["lost"] > 0 for row in rows.values())
    results = f"{len(late)} results came too late, {watched.repeated} twice"
    return f"{dict(states)}; {again} made again; {results}; {watched.looks} looks"

"""Functions over REST: deploy, versions, invocations and what becomes of them. No worker runs here: rows play it."""

import asyncio
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from .conftest import Api, People, person

FUNCTION = {"sku": "g1.1"}
UNIT = {
    "operationID": "unit-sd-webui-001",
    "name": "sd-webui-template",
    "specName": "g1.1",
    "image": "python:3.12",
    "template": {"ports": [{"name": "http", "port": 8080}]},
    "access": {"primaryPort": "http", "scheme": "http"},
    "serverless": {
        "enabled": True,
        "requestID": "sd-webui",
        "minAvailableCount": 1,
        "idleTimeoutSeconds": 300,
        "minRequestCount": 0,
    },
}


@pytest.fixture
async def conn(api: Api) -> AsyncIterator[Any]:
    """The database itself, to play workers."""
    connected = await asyncpg.connect(api.database_url)
    yield connected
    await connected.close()


async def put(api: Api, name: str, **changed: Any) -> dict[str, Any]:
    answer = await api.call("PUT", f"/functions/{name}", json=FUNCTION | changed)
    assert answer.status == 200, answer.content
    return answer.json


async def invoke(api: Api, name: str, **changed: Any) -> dict[str, Any]:
    answer = await api.call("POST", "/serverless/invocations", json={"serverlessRequestID": name, **changed})
    assert answer.status in (200, 202), answer.content
    return answer.json["data"]


async def end(
    conn: Any, invocation: str, result: bytes = b"42", content_type: str = "application/json", **set_: Any
) -> None:
    """As the activator commits a result."""
    values = {"state": "succeeded", "encoding": "", "status_code": 200} | set_
    columns = "".join(f", {name} = ${n}" for n, name in enumerate(values, 4))
    await conn.execute(
        f"update serverless.invocations set waiting = false, finished_at = clock_timestamp(), result = $2,"
        f" result_type = $3{columns} where id = $1",
        invocation,
        result,
        content_type,
        *values.values(),
    )


async def test_the_same_definition_again_is_the_same_version(api: Api) -> None:
    first = await put(api, "Twice")
    assert (first["name"], first["current_version"], first["serving_version"]) == ("twice", 1, 1)
    assert (await put(api, "twice"))["current_version"] == 1
    changed = await put(api, "twice", concurrency=4, env={"A": "b"})
    assert (changed["current_version"], changed["serving_version"], changed["id"]) == (2, 2, first["id"])
    assert changed["definition"]["concurrency"] == 4
    assert changed["url"].endswith("/f/twice")
    versions = (await api.call("GET", "/functions/twice/versions")).json["items"]
    assert [(each["number"], each["current"]) for each in versions] == [(2, True), (1, False)]


async def test_a_version_takes_over_when_no_worker_of_the_old_one_is_ready(api: Api, conn: Any) -> None:
    made = await put(api, "moving")
    await conn.execute(
        "insert into serverless.workers (id, function_id, project_id, request, version, allocation_id, state, slots,"
        " token_hash, mac_key, lease_until) values ('unit-moving-worker-1', $1, 'prj_default', 'moving', 1, 'alc_m',"
        " 'ready', 1, '', '', clock_timestamp() + interval '1 hour')",
        made["id"],
    )
    moved = await put(api, "moving", concurrency=2)
    assert (moved["current_version"], moved["serving_version"]) == (2, 1)
    workers = (await api.call("GET", "/functions/moving/workers")).json["items"]
    assert [(each["name"], each["state"]) for each in workers] == [("unit-moving-worker-1", "ready")]
    await conn.execute(
        "update serverless.workers set state = 'gone', gone_at = now() where function_id = $1", made["id"]
    )
    assert (await put(api, "moving", concurrency=3))["serving_version"] == 3


async def test_rollback_goes_to_a_number_or_to_the_one_before(api: Api) -> None:
    for concurrency in (1, 2, 3):
        await put(api, "back", concurrency=concurrency)
    before = await api.call("POST", "/functions/back/rollback", json={})
    assert (before.status, before.json["current_version"]) == (200, 2)
    assert before.json["definition"]["concurrency"] == 2
    to = await api.call("POST", "/functions/back/rollback", json={"version": 1})
    assert to.json["current_version"] == 1
    for wanted in (9, None):
        answer = await api.call("POST", "/functions/back/rollback", json={"version": wanted})
        assert (answer.status, answer.error["code"]) == (404, "serverless.no_version")
    assert (await put(api, "back", concurrency=1))["current_version"] == 1
    assert (await put(api, "back", concurrency=9))["current_version"] == 4


BAD = [
    ({"sku": "none"}, "sku"),
    ({"gpus": 7}, "gpus"),
    ({"command": ["x"], "code": {"object": "a", "sha256": "0" * 64, "bytes": 1}, "handler": "m:f"}, "command"),
    ({"handler": "m:f"}, "handler"),
    ({"code": {"object": "absent", "sha256": "0" * 64, "bytes": 1}, "handler": "m:f"}, "code.object"),
    ({"workers_min": 9}, "workers_min"),
    ({"framework": {"socketPath": "/tmp/elsewhere.sock"}}, "framework.socketPath"),
    ({"framework": {"socketPath": "/tmp/serverless-framework/../x"}}, "framework.socketPath"),
    ({"framework": {"socketPath": "/tmp/serverless-framework/" + "x" * 90}}, "framework.socketPath"),
    ({"env": {"LD_PRELOAD": "x"}}, "env"),
    ({"secrets": [{"name": "absent"}]}, "secrets"),
    ({"runtime": "absent"}, "runtime"),
    ({"image": "Bad Image"}, "image"),
    ({"schedule": {"cron": "61 * * * *"}}, "schedule.cron"),
    ({"schedule": {"cron": "* * * * *", "timezone": "Mars/Base"}}, "schedule.timezone"),
    ({"webhook": "http://10.0.0.1/x"}, "webhook"),
    ({"concurrency": 0}, "concurrency"),
    ({"timeout_s": 90_000}, "timeout_s"),
]


@pytest.mark.parametrize(("changed", "field"), BAD, ids=[f"{field}-{n}" for n, (_, field) in enumerate(BAD)])
async def test_what_cannot_be_served_is_refused_by_field(api: Api, changed: dict[str, Any], field: str) -> None:
    answer = await api.call("PUT", "/functions/refused", json=FUNCTION | changed)
    assert answer.status == 400, answer.content
    assert answer.error["field"] == field
    assert (await api.call("GET", "/functions/refused")).status == 404


@pytest.mark.parametrize("name", ["a.b", "x" * 64, "prj_" + "0" * 26 + "_f"])
async def test_names_that_no_subject_can_have_are_refused(api: Api, name: str) -> None:
    answer = await api.call("PUT", f"/functions/{name}", json=FUNCTION)
    assert (answer.status, answer.error["field"]) == (400, "name")


async def test_code_is_an_object_with_that_digest(api: Api) -> None:
    archive = gzip.compress(_tar(b"x" * 100_000, name="app.py"), mtime=0)
    assert (await api.call("PUT", "/objects/code.tgz", body=archive)).status == 200
    code = {"object": "code.tgz", "sha256": hashlib.sha256(archive).hexdigest(), "bytes": len(archive)}
    made = await put(api, "coded", code=code, handler="app:f")
    assert made["definition"]["code"] == code
    for field, value in (("sha256", "0" * 64), ("bytes", 3)):
        wrong = FUNCTION | {"code": code | {field: value}, "handler": "app:f"}
        answer = await api.call("PUT", "/functions/coded", json=wrong)
        assert (answer.status, answer.error["field"]) == (400, f"code.{field}")


def _tar(content: bytes, **changes: object) -> bytes:
    member = tarfile.TarInfo("link")
    member.size = len(content)
    for field, value in changes.items():
        setattr(member, field, value)
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        archive.addfile(member, io.BytesIO(content))
    return plain.getvalue()


@pytest.mark.parametrize(
    "archive",
    [
        b"no archive",
        gzip.compress(b"no archive"),
        gzip.compress(_tar(b"x"))[:-30],
        gzip.compress(_tar(b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")),
        gzip.compress(_tar(b"2 " * (1 << 19) + b"=", type=tarfile.XHDTYPE)),
        gzip.compress(_tar(bytes(1 << 20), type=tarfile.GNUTYPE_SPARSE)),
        gzip.compress(_tar(b"x", name="../evil")),
    ],
    ids=["text", "no tar", "cut off", "link", "pax", "sparse", "elsewhere"],
)
async def test_code_that_no_node_can_unpack_is_refused_when_it_is_deployed(api: Api, archive: bytes) -> None:
    assert (await api.call("PUT", "/objects/bad.tgz", body=archive)).status == 200
    code = {"object": "bad.tgz", "sha256": hashlib.sha256(archive).hexdigest(), "bytes": len(archive)}
    answer = await api.call("PUT", "/functions/unusable", json=FUNCTION | {"code": code, "handler": "app:f"})
    assert (answer.status, answer.error["field"]) == (400, "code.object")
    assert "is no archive of code" in answer.error["message"]
    assert (await api.call("GET", "/functions/unusable")).status == 404


async def test_an_invocation_waits_and_says_for_what(api: Api, conn: Any) -> None:
    await put(api, "waits")
    ack = await invoke(api, "waits", payload={"a": 1}, attributes={"path": "/x"})
    assert ack["state"] == "queued"
    assert not ack["duplicate"]
    one = (await api.call("GET", f"/invocations/{ack['invocationID']}")).json
    assert (one["state"], one["waiting_for"]) == ("queued", "a worker")
    await conn.execute("update serverless.functions set wait_reason = 'no capacity' where name = 'waits'")
    second = await invoke(api, "waits", payload={"a": 2})
    two = (await api.call("GET", f"/invocations/{second['invocationID']}")).json
    assert two["waiting_for"] == "a worker: no capacity; 1 before it"
    late = await invoke(api, "waits", delaySeconds=3600)
    assert (await api.call("GET", f"/invocations/{late['invocationID']}")).json["waiting_for"].startswith("its time")
    listed = (await api.call("GET", "/invocations?function=waits&state=queued&limit=2")).json
    assert [each["id"] for each in listed["items"]] == [late["invocationID"], second["invocationID"]]
    rest = (await api.call("GET", f"/invocations?function=waits&limit=2&cursor={listed['next_cursor']}")).json
    assert [each["id"] for each in rest["items"]] == [ack["invocationID"]]
    shown = (await api.call("GET", "/functions/waits")).json
    assert (shown["queued"], shown["waiting_for"]) == (3, "no capacity")


async def test_the_same_id_is_the_same_invocation_and_another_payload_a_conflict(api: Api) -> None:
    await put(api, "same")
    body = {"serverlessRequestID": "same", "invocationID": "same-1", "payload": [1]}
    first = await api.call("POST", "/serverless/invocations", json=body)
    again = await api.call("POST", "/serverless/invocations", json=body)
    assert (first.status, again.status, again.json["data"]["duplicate"]) == (202, 200, True)
    other = await api.call("POST", "/serverless/invocations", json=body | {"payload": [2]})
    assert other.status == 409
    keyed = {"Idempotency-Key": "one"}
    ids = [
        (await api.call("POST", "/serverless/invocations", json={"serverlessRequestID": "same"}, headers=keyed)).json
        for _ in range(2)
    ]
    assert ids[0]["data"]["invocationID"] == ids[1]["data"]["invocationID"]


async def test_without_a_definition_it_fails_at_once(api: Api) -> None:
    answer = await api.call("POST", "/serverless/invocations", json={"serverlessRequestID": "nobody", "mode": "sync"})
    assert (answer.status, answer.json["data"]["failureClass"]) == (200, "no_worker_template")
    body = {"serverlessRequestID": "nobody", "invocationID": "nobodys"}
    first, again = [(await api.call("POST", "/serverless/invocations", json=body)) for _ in range(2)]
    assert (first.status, first.json["data"]["duplicate"], first.json["data"]["state"]) == (202, False, "failed")
    assert (again.status, again.json["data"]["duplicate"]) == (200, True)


async def test_results_come_as_they_were_answered(api: Api, conn: Any) -> None:
    await put(api, "answers")
    cases = {
        "json": (b'{"a": 1}', "application/json", "", b'{"a": 1}'),
        "text": (b'"hello"', "text/plain", "", b"hello"),
        "bytes": (b'"AAEC"', "image/png", "base64", b"\0\1\2"),
    }
    for name, (kept, kind, encoding, raw) in cases.items():
        await invoke(api, "answers", invocationID=f"answers-{name}")
        early = await api.call("GET", f"/invocations/answers-{name}/result")
        assert (early.status, early.error["code"]) == (409, "serverless.not_finished")
        await end(conn, f"answers-{name}", kept, kind, encoding=encoding)
        answer = await api.call("GET", f"/invocations/answers-{name}/result")
        assert (answer.status, answer.content, answer.headers["content-type"]) == (200, raw, kind)
        shown = (await api.call("GET", f"/invocations/answers-{name}")).json
        assert (shown["body"], shown["content_type"]) == (json.loads(kept), kind)


@pytest.mark.parametrize(
    ("kept", "shown"),
    [(b'{"a": "caf\xe9"}', {"a": "caf\ufffd"}), (b"\x89PNG", "\ufffdPNG")],
    ids=["not utf-8", "no json"],
)
async def test_a_stored_result_that_is_no_json_text_leaves_the_answer_json(
    api: Api, conn: Any, kept: bytes, shown: object
) -> None:
    await put(api, "strange")
    made = (await invoke(api, "strange"))["invocationID"]
    await end(conn, made, kept, "text/plain")
    answer = await api.call("GET", f"/invocations/{made}")
    assert (answer.status, json.loads(answer.content.decode())["body"]) == (200, shown)
    assert (await api.call("GET", f"/invocations/{made}/result")).content == kept


async def test_a_failed_invocation_has_no_result_whatever_its_handler_left(api: Api, conn: Any) -> None:
    await put(api, "fails")
    await invoke(api, "fails", invocationID="fails-1")
    await end(conn, "fails-1", b'{"half": "an answer"}')
    await conn.execute("update serverless.invocations set state = 'failed', error = 'boom' where id = 'fails-1'")
    answer = await api.call("GET", "/invocations/fails-1/result")
    assert (answer.status, answer.error["code"]) == (409, "serverless.no_result")
    assert "failed" in answer.error["message"]
    assert "boom" in answer.error["message"]


async def test_a_large_result_is_fetched_from_where_it_is_kept(api: Api, conn: Any) -> None:
    await put(api, "large")
    await invoke(api, "large", invocationID="large-1")
    content = b"x" * 100_000
    assert (await api.call("PUT", "/objects/invocations/large-1/result-1", body=content)).status == 200
    reference = {
        "key": "invocations/large-1/result-1",
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    await end(conn, "large-1", None, "application/octet-stream", result_ref=json.dumps(reference))  # type: ignore[arg-type]
    shown = (await api.call("GET", "/invocations/large-1")).json
    assert shown["result"]["bytes"] == len(content)
    assert shown["result"]["url"].endswith("/api/v1/invocations/large-1/result")
    assert (await api.call("GET", "/invocations/large-1/result")).content == content


async def test_payloads_may_have_twenty_megabytes_and_no_more(api: Api, conn: Any) -> None:
    await put(api, "heavy")
    body = b'{"serverlessRequestID": "heavy", "invocationID": "heavy-1", "payload": "%s"}' % (b"x" * (5 << 20))
    sent: Any = io.BytesIO(body)
    assert (await api.call("POST", "/serverless/invocations", body=sent)).status == 202
    row = await conn.fetchrow("select payload, payload_ref from serverless.invocations where id = 'heavy-1'")
    assert row["payload"] is None
    assert json.loads(row["payload_ref"])["bytes"] == (5 << 20) + 2
    for path, length in (("serverless/invocations", 22 << 20), ("gpu-units", 2 << 20)):
        head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
        assert (await api.raw(head.encode(), timeout_s=5))[0].startswith(b"HTTP/1.1 413"), path


async def test_who_waits_is_told_at_the_end(api: Api, conn: Any) -> None:
    await put(api, "polled")
    await invoke(api, "polled", invocationID="polled-1")
    assert (await api.call("GET", "/invocations/polled-1?wait_s=0.2")).json["state"] == "queued"
    waiting = asyncio.create_task(api.call("GET", "/invocations/polled-1?wait_s=30"))
    await asyncio.sleep(0.1)
    await end(conn, "polled-1")
    answer = await asyncio.wait_for(waiting, 20)
    assert (answer.json["state"], answer.json["body"]) == ("succeeded", 42)
    assert (await api.call("GET", "/invocations/polled-1?wait_s=61")).status == 400


@pytest.mark.parametrize("way", ["sync", "poll"])
async def test_who_waits_with_a_revoked_key_is_out_within_five_seconds(api: Api, people: People, way: str) -> None:
    project_id = people.developer.project_id
    waiter, home = await person(api, project_id, "developer"), {"Penstock-Project": project_id}
    assert (await api.call("PUT", f"/functions/revoked-{way}", json=FUNCTION, headers=home)).status == 200
    sent = {"serverlessRequestID": f"revoked-{way}", "invocationID": f"revoked-{way}"}
    if way == "sync":
        body = {**sent, "mode": "sync", "timeoutSeconds": 25}
        waiting = asyncio.create_task(api.call("POST", "/serverless/invocations", json=body, key=waiter.key))
    else:
        await api.call("POST", "/serverless/invocations", json=sent, key=waiter.key)
        waiting = asyncio.create_task(api.call("GET", f"/invocations/revoked-{way}?wait_s=25", key=waiter.key))
    await asyncio.sleep(1)
    assert not waiting.done()
    assert (await api.call("DELETE", f"/keys/{waiter.key_id}", headers=home)).status == 204
    async with asyncio.timeout(5):
        answer = await waiting
    assert (answer.status, answer.json["error"]["code"]) == (401, "unauthenticated")
    kept = await api.call("GET", f"/invocations/revoked-{way}", headers=home)
    assert kept.json["state"] == "queued"


async def test_cancelled_in_the_queue_it_never_runs(api: Api) -> None:
    await put(api, "stops")
    await invoke(api, "stops", invocationID="stops-1")
    for _ in range(2):
        answer = await api.call("POST", "/invocations/stops-1/cancel")
        assert (answer.status, answer.json["state"], answer.json["failure_class"]) == (200, "cancelled", "cancelled")
    result = await api.call("GET", "/invocations/stops-1/result")
    assert (result.status, result.error["code"]) == (409, "serverless.no_result")
    waiter = asyncio.create_task(
        api.call("POST", "/serverless/invocations", json={"serverlessRequestID": "stops", "mode": "sync",
                                                         "invocationID": "stops-2", "timeoutSeconds": 30})
    )  # fmt: skip
    async with asyncio.timeout(20):
        while (await api.call("POST", "/invocations/stops-2/cancel")).status != 200:
            await asyncio.sleep(0.02)
    told = await asyncio.wait_for(waiter, 20)
    assert (told.status, told.json["data"]["state"]) == (200, "cancelled")


async def test_a_cancel_that_is_answered_has_cancelled_whatever_came_in_between(api: Api) -> None:
    await put(api, "races")

    async def race(name: str) -> None:
        made = asyncio.create_task(invoke(api, "races", invocationID=name))
        while (answer := await api.call("POST", f"/invocations/{name}/cancel")).status != 200:
            await asyncio.sleep(0)
        assert answer.json["state"] == "cancelled"
        await made

    for turn in range(20):
        await asyncio.gather(*(race(f"race-{turn}-{n}") for n in range(8)))


async def test_a_retry_is_a_new_invocation_of_the_same_payload(api: Api, conn: Any) -> None:
    await put(api, "again")
    await invoke(api, "again", invocationID="again-1", payload={"n": 1}, attributes={"path": "/p"})
    open_ = await api.call("POST", "/invocations/again-1/retry")
    assert (open_.status, open_.error["code"]) == (409, "serverless.not_finished")
    await end(conn, "again-1", state="failed")
    made = [(await api.call("POST", "/invocations/again-1/retry")).json["id"] for _ in range(2)]
    assert made == ["again-1-r1", "again-1-r2"]
    row = await conn.fetchrow("select payload, attributes from serverless.invocations where id = 'again-1-r1'")
    assert (row["payload"], json.loads(row["attributes"])) == (b'{"n": 1}', {"path": "/p"})
    keyed = {
        (await api.call("POST", "/invocations/again-1/retry", headers={"Idempotency-Key": "k"})).json["id"]
        for _ in "ab"
    }
    assert len(keyed) == 1


async def test_map_makes_one_of_each_and_the_same_batch_once(api: Api) -> None:
    await put(api, "mapped")
    body = {"payloads": [1, {"a": 2}, None], "id": "batch"}
    first = await api.call("POST", "/functions/mapped/map", json=body)
    assert (first.status, first.json["invocations"]) == (201, ["batch-0", "batch-1", "batch-2"])
    assert (await api.call("POST", "/functions/mapped/map", json=body)).json == first.json
    assert (await api.call("GET", "/functions/mapped")).json["queued"] == 3
    assert (await api.call("POST", "/functions/absent/map", json=body)).status == 404


async def test_streams_give_what_was_said_and_then_the_end(api: Api, conn: Any) -> None:
    function = await put(api, "talks")
    await invoke(api, "talks", invocationID="talks-1")
    for seq, text in enumerate(("one", "two")):
        await conn.execute(
            "insert into serverless.outputs (project_id, invocation_id, attempt, seq, kind, text, function_id)"
            " values ('prj_default', 'talks-1', 1, $1, 'stdout', $2, $3)",
            seq,
            text,
            function["id"],
        )
    logs = (await api.call("GET", "/functions/talks/logs?limit=1")).json
    assert [line["text"] for line in logs["items"]] == ["one"]
    more = (await api.call("GET", f"/functions/talks/logs?cursor={logs['next_cursor']}")).json
    assert [line["text"] for line in more["items"]] == ["two"]
    newest = (await api.call("GET", "/functions/talks/logs?order=desc&invocation=talks-1")).json["items"]
    assert [line["text"] for line in newest] == ["two", "one"]
    await end(conn, "talks-1")
    told = (await api.call("GET", "/invocations/talks-1/events")).content.decode()
    assert told.count("event: output") == 2
    assert told.index("event: end") > told.index('"two"')
    resumed = await api.call("GET", "/invocations/talks-1/events", headers={"Last-Event-ID": "1.0"})
    assert resumed.content.count(b"event: output") == 1
    assert (await api.call("GET", "/invocations/talks-1/events", headers={"Last-Event-ID": "x"})).status == 400


async def test_logs_are_followed_as_they_come(api: Api, conn: Any) -> None:
    function = await put(api, "followed")
    url = f"http://127.0.0.1:{api.port}/api/v1/functions/followed/logs?follow=true"
    async with api.session.get(url, headers={"Authorization": f"Bearer {api.admin_key}"}) as response:
        assert response.content_type == "text/event-stream"
        assert await response.content.readline() == b": connected\n"
        await conn.execute(
            "insert into serverless.outputs (project_id, invocation_id, attempt, seq, kind, text, function_id)"
            " values ('prj_default', 'followed-1', 1, 0, 'stderr', 'now', $1)",
            function["id"],
        )
        async with asyncio.timeout(20):
            while not (line := await response.content.readline()).startswith(b"data:"):
                pass
        assert json.loads(line[5:])["text"] == "now"


async def test_a_dead_letter_is_replayed_once_or_forgotten(api: Api, conn: Any) -> None:
    await put(api, "buried")
    for n in (1, 2):
        await invoke(api, "buried", invocationID=f"buried-{n}", payload=n)
        await end(conn, f"buried-{n}", state="dead_lettered")
        await conn.execute(
            "insert into serverless.dead_letters (id, project_id, function_name, source, invocation_id, failure_class,"
            " error, subject, payload) values ($1, 'prj_default', 'buried', 'invocation', $2, 'retry_exhausted', 'e',"
            " '', '')",
            f"dlt_{n:026}",
            f"buried-{n}",
        )
    letters = (await api.call("GET", "/serverless/dead-letters?function=buried")).json["items"]
    assert [each["invocation_id"] for each in letters] == ["buried-2", "buried-1"]
    path = f"/serverless/dead-letters/{letters[0]['id']}"
    replayed = await api.call("POST", f"{path}/replay")
    assert (replayed.status, replayed.json["state"]) == (201, "queued")
    again = await api.call("POST", f"{path}/replay")
    assert (again.status, again.error["code"]) == (409, "serverless.replayed")
    assert (await api.call("GET", "/serverless/dead-letters?function=buried&limit=1")).json["items"][0][
        "replayed_as"
    ] == replayed.json["id"]
    assert (await api.call("DELETE", path)).status == 204
    assert (await api.call("DELETE", path)).status == 404


async def test_deleting_ends_what_waits_and_frees_the_name(api: Api) -> None:
    made = await put(api, "gone", schedule={"cron": "0 4 * * *", "timezone": "Europe/Berlin"})
    await invoke(api, "gone", invocationID="gone-1")
    assert (await api.call("DELETE", "/functions/gone")).status == 204
    ended = (await api.call("GET", "/invocations/gone-1")).json
    assert (ended["state"], ended["failure_class"]) == ("failed", "no_worker_template")
    assert (await api.call("GET", "/functions/gone")).status == 404
    assert (await api.call("DELETE", "/functions/gone")).status == 404
    gone = await api.call("POST", "/invocations/gone-1/retry")
    assert (gone.status, gone.error["code"]) == (409, "serverless.function_gone")
    assert (await put(api, "gone"))["id"] != made["id"]


async def test_every_change_leaves_a_fact_and_an_audit_row(api: Api, conn: Any) -> None:
    made = await put(api, "recorded")
    await put(api, "recorded", concurrency=2)
    await api.call("POST", "/functions/recorded/rollback", json={})
    await api.call("DELETE", "/functions/recorded")
    facts = await conn.fetch("select type, version from kit.outbox where aggregate_id = $1 order by seq", made["id"])
    kinds = ["deployed", "deployed", "rolled_back", "deleted"]
    assert [row["type"] for row in facts] == [f"serverless.function_{kind}" for kind in kinds]
    assert [row["version"] for row in facts] == sorted({row["version"] for row in facts})
    audits = await conn.fetch("select action from kit.audit where target_id = $1 order by seq", made["id"])
    assert [row["action"] for row in audits] == [
        f"functions.{action}" for action in ("deploy", "deploy", "rollback", "delete")
    ]


async def test_the_units_of_the_source_are_functions(api: Api) -> None:
    first = await api.call("POST", "/gpu-units", json=UNIT)
    assert first.status == 201, first.content
    unit = first.json["data"]
    assert (unit["operationID"], unit["specName"]) == ("unit-sd-webui-001", "g1.1")
    assert (unit["status"]["phase"], unit["status"]["serverless"]["phase"]) == ("Empty", "Pending")
    assert unit["serverless"]["minAvailableCount"] == 1
    again = await api.call("POST", "/gpu-units", json=UNIT)
    assert (again.status, again.json) == (200, first.json)
    conflicts = [UNIT | {"image": "python:3.11"}, UNIT | {"operationID": "another"}]
    for body in conflicts:
        answer = await api.call("POST", "/gpu-units", json=body)
        assert (answer.status, answer.error["code"]) == (409, "operation_conflict")
    function = (await api.call("GET", "/functions/sd-webui")).json["definition"]
    assert (function["workers_min"], function["idle_s"], function["image"]) == (1, 300, "python:3.12")
    body = {
        "serverlessRequestID": "sd-webui",
        "mode": "async",
        "attributes": {"path": "/generate"},
        "payload": {"p": 1},
    }
    ack = await api.call("POST", "/serverless/invocations", json=body)
    assert (ack.status, ack.json["data"]["subject"]) == (202, "runtime.serverless.invoke.sd-webui")
    assert (await api.call("GET", "/gpu-units/sd-webui-template")).json == first.json
    assert [each["name"] for each in (await api.call("GET", "/gpu-units")).json["items"]] == ["sd-webui-template"]
    assert (await api.call("DELETE", "/gpu-units/sd-webui-template")).status == 204
    assert (await api.call("GET", "/functions/sd-webui")).status == 404


async def test_a_unit_is_changed_by_a_put_and_each_operation_has_one_effect(api: Api) -> None:
    path, made = "/gpu-units/sd-webui-template", await api.call("POST", "/gpu-units", json=UNIT)
    assert made.status == 201
    changed = UNIT | {"operationID": "change-1", "image": "python:3.11", "template": {"envs": {"A": "1"}}}
    answer = await api.call("PUT", path, json=changed)
    assert answer.status == 200, answer.content
    unit = answer.json["data"]
    assert (unit["operationID"], unit["image"], unit["template"]["envs"]) == ("change-1", "python:3.11", {"A": "1"})
    assert (await api.call("PUT", path, json=changed)).json == answer.json
    again = await api.call("POST", "/gpu-units", json=UNIT)
    assert (again.status, again.json) == (200, answer.json), "it was made before; this is how it stands"
    assert (await api.call("GET", path)).json == answer.json
    function = (await api.call("GET", "/functions/sd-webui")).json
    assert (function["current_version"], function["definition"]["image"]) == (2, "python:3.11")
    for body in (changed | {"image": "python:3.12"}, changed | {"operationID": UNIT["operationID"]}):
        conflict = await api.call("PUT", path, json=body)
        assert (conflict.status, conflict.error["code"]) == (409, "operation_conflict")
    conflict = await api.call("POST", "/gpu-units", json=changed)
    assert (conflict.status, conflict.error["field"]) == (409, "operationID")
    assert (await api.call("PUT", "/gpu-units/nothing", json=changed)).status == 404
    assert (await api.call("GET", "/functions/sd-webui")).json["current_version"] == 2
    assert (await api.call("DELETE", path)).status == 204
    assert (await api.call("PUT", path, json=changed)).status == 404
    assert (await api.call("POST", "/gpu-units", json=UNIT)).status == 201, (
        "a new one, by an operation that is free again"
    )


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"name": "other"}, "name"),
        ({"specName": "g2"}, "specName"),
        ({"specName": "", "packageID": "g2"}, "packageID"),
        ({"serverless": {"enabled": True, "requestID": "other"}}, "serverless.requestID"),
        ({"serverless": {"enabled": False}}, "serverless.enabled"),
        ({"operationID": ""}, "operationID"),
    ],
)
async def test_what_makes_a_unit_that_unit_stays(api: Api, changed: dict[str, Any], field: str) -> None:
    await api.call("POST", "/gpu-units", json=UNIT)
    answer = await api.call("PUT", "/gpu-units/sd-webui-template", json=UNIT | {"operationID": "change"} | changed)
    assert (answer.status, answer.error["field"]) == (400, field)
    assert (await api.call("GET", "/gpu-units/sd-webui-template")).json["data"]["operationID"] == UNIT["operationID"]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"serverless": {"enabled": False}}, "serverless.enabled"),
        ({"serverless": {"enabled": True}}, "serverless.requestID"),
        ({"serverless": {"enabled": True, "requestID": "a.b"}}, "serverless.requestID"),
        ({"specName": ""}, "specName"),
        ({"packageID": "g2"}, "packageID"),
        ({"template": {"args": ["x"]}}, "template.args"),
    ],
)
async def test_units_that_are_no_functions_are_refused(api: Api, changed: dict[str, Any], field: str) -> None:
    answer = await api.call("POST", "/gpu-units", json=UNIT | {"operationID": "o", "name": "n"} | changed)
    assert (answer.status, answer.error["field"]) == (400, field)


async def test_the_signing_key_is_for_those_who_write_functions(api: Api, people: People) -> None:
    first = await api.call("GET", "/serverless/signing-key", key=people.developer.key)
    again = await api.call("GET", "/serverless/signing-key", key=people.owner.key)
    assert first.json == again.json
    assert first.json["secret"].startswith("fsk_")
    assert (await api.call("GET", "/serverless/signing-key", key=people.sister.key)).json != first.json
    assert (await api.call("GET", "/serverless/signing-key", key=people.viewer.key)).status == 403

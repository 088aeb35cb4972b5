"""Every route of the contract, for everyone who may not: refused, and another project's object looks absent.

The routes come from the running server's own OpenAPI document, so a route that is added is walked too. One with a body
needs a sample in operations.py, or the walk fails.
"""

import asyncio
from typing import Any

import pytest
from yarl import URL

from .conftest import Api, People
from .operations import BODIES, CANARY, UNKNOWN, VIEWER_MAY, Operation


async def send(api: Api, operation: Operation, ids: dict[str, str], key: str) -> tuple[int, Any]:
    """Status and body without what differs by nature; streams are read for a moment."""
    if operation.id == "streamEvents" and key:
        return await peek(api, operation.at(ids), key)
    if operation.has_body and operation.id not in BODIES:
        pytest.fail(f"add a sample body for {operation.id}")
    answer = await api.call(operation.method, operation.at(ids), key=key, json=BODIES.get(operation.id))
    body = answer.json
    if answer.status >= 400:
        error = answer.error
        assert error.pop("correlation_id")
        # A refusal names what was asked for.
        asked = {*operation.at(ids).split("/")} - {*operation.path.split("/")}
        for name in sorted(asked, key=len, reverse=True):
            error["message"] = error["message"].replace(name, "?")
    return answer.status, body


async def peek(api: Api, path: str, key: str) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{api.port}/api/v1{path}"
    async with api.session.get(url, headers={"Authorization": f"Bearer {key}"}) as response:
        if response.status != 200:
            body = await response.json()
            body["error"].pop("correlation_id")
            return response.status, body
        try:
            async with asyncio.timeout(0.3):
                return 200, (await response.content.read()).decode()
        except TimeoutError:
            return 200, ""


async def test_nobody_passes_without_a_valid_key(
    api: Api, people: People, operations: list[Operation], objects: dict[str, str]
) -> None:
    for operation in operations:
        if operation.public:
            continue
        for key in ("", people.revoked.key, "psk_" + "A" * 43):
            status, body = await send(api, operation, objects, key)
            assert status == 401, (operation, key[:8], body)
            assert body["error"]["code"] == "unauthenticated"


def test_only_enrolment_logging_in_and_payment_providers_are_public(operations: list[Operation]) -> None:
    public = {operation.id for operation in operations if operation.public}
    assert public == {
        "enrolNode",
        "getLogin",
        "createSession",
        "logout",
        "receiveLocalEvent",
        "receiveStripeEvent",
    }


async def test_logging_out_needs_the_session_itself(api: Api, people: People) -> None:
    for credential in ("", people.owner.key, "pss_" + "A" * 43, "a.b.c"):
        answer = await api.call("DELETE", "/sessions/current", key=credential)
        assert answer.status == 401, credential


async def test_viewers_only_look(
    api: Api, people: People, operations: list[Operation], objects: dict[str, str]
) -> None:
    assert {operation.id for operation in operations} >= VIEWER_MAY
    for operation in operations:
        if operation.public:
            continue
        status, body = await send(api, operation, objects, people.viewer.key)
        # Everyone ends their own sessions, and this is nobody's.
        expected = 404 if operation.id == "revokeSession" else 200 if operation.id in VIEWER_MAY else 403
        assert status == expected, (operation, body)


@pytest.mark.parametrize("who", ["sister", "stranger"])
async def test_anothers_object_looks_absent(
    who: str, api: Api, people: People, operations: list[Operation], objects: dict[str, str]
) -> None:
    key = getattr(people, who).key
    walked = 0
    for operation in operations:
        owned = [name for name in operation.parameters if name not in ("name", "key")]
        # Anybody may have a function of any name.
        if operation.public or not owned or operation.id == "putFunction":
            continue
        theirs = await send(api, operation, objects, key)
        unknown = await send(api, operation, {"name": "g1.1"}, key)
        assert theirs == unknown, operation
        assert theirs[0] in (403, 404), (operation, theirs)
        walked += 1
    assert walked >= 20


@pytest.mark.parametrize("who", ["sister", "stranger"])
async def test_lists_show_nothing_of_others(
    who: str, api: Api, people: People, operations: list[Operation], objects: dict[str, str]
) -> None:
    secrets = {CANARY, *objects.values()} - {"g1.1"}
    for operation in operations:
        if operation.method == "GET" and not operation.parameters:
            status, body = await send(api, operation, objects, getattr(people, who).key)
            assert status in (200, 403), (operation, body)
            assert not [secret for secret in secrets if secret in str(body)], operation


async def test_owners_do_see_their_own(api: Api, people: People, objects: dict[str, str]) -> None:
    """Without this, the walks above would pass on a server that refuses everything."""
    for path in (f"/allocations/{objects['allocation_id']}", f"/keys/{objects['key_id']}"):
        answer = await api.call("GET", path, key=people.owner.key)
        assert answer.status == 200
        assert CANARY in str(answer.json)


async def test_a_key_is_bound_to_its_project(api: Api, people: People) -> None:
    for project_id in (people.sister.project_id, f"prj_{UNKNOWN}", "nonsense"):
        answer = await api.call("GET", "/whoami", key=people.owner.key, headers={"Penstock-Project": project_id})
        assert answer.status == 403
        assert answer.error["code"] == "identity.key_bound"


STRANGE = ["%00", "%ff", "%ed%a0%80", "a" * 3000, "%F0%9F%98%80", "'", "%0a", "..", "-1", "9" * 30]


async def test_no_strange_parameter_breaks_a_route(api: Api, operations: list[Operation]) -> None:
    """In the path and in the query; what comes back is never the server's own failure."""
    async with api.session.get(f"http://127.0.0.1:{api.port}/api/openapi.json") as response:
        document = await response.json(content_type=None)
    sent = 0
    for operation in operations:
        inner = document["paths"][operation.path][operation.method.lower()]
        queries = [each["name"] for each in inner.get("parameters", []) if each["in"] == "query"]
        for value in STRANGE:
            targets = [
                operation.path.replace("{", "").replace("}", "").replace(name, value) for name in operation.parameters
            ]
            targets += [operation.path.replace("{", "").replace("}", "") + f"?{name}={value}" for name in queries]
            for target in targets:
                status = await _status(api, operation, target)
                assert status < 500, (operation, target)
                sent += 1
    assert sent > 500
    assert "value_unchecked" not in api.log.read_text()


async def _status(api: Api, operation: Operation, target: str) -> int:
    url = URL(f"http://127.0.0.1:{api.port}{target}", encoded=True)
    headers = {"Authorization": f"Bearer {api.admin_key}"}
    async with api.session.request(operation.method, url, headers=headers, json=BODIES.get(operation.id)) as response:
        return response.status

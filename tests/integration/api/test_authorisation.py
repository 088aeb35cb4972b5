"""Every route of the contract, for everyone who may not: refused, and another project's object looks absent.

The routes come from the running server's own OpenAPI document, so a route that is added is walked too. One with a body
needs a sample here, or the walk fails.
"""

import asyncio
import re
from dataclasses import dataclass
from typing import Any

import asyncpg
import pytest
from yarl import URL

from .conftest import SKU, Api, People, made

UNKNOWN = "0" * 26
CANARY = "canary-9e1f"
#: What a viewer may do. Everything else is refused with 403.
VIEWER_MAY = {
    "getAllocation",
    "getBudget",
    "getEgress",
    "getFunction",
    "getGpuUnit",
    "getInvocation",
    "getInvocationResult",
    "getObject",
    "getPrice",
    "getProject",
    "getQuota",
    "getRuntime",
    "getSecret",
    "getSku",
    "getUsage",
    "getWebhook",
    "listAllocations",
    "listBudgets",
    "listEvents",
    "listFunctionDeadLetters",
    "listFunctionLogs",
    "listFunctionVersions",
    "listFunctionWorkers",
    "listFunctions",
    "listGpuUnits",
    "listInvocations",
    "listMembers",
    "listObjects",
    "listOrganisations",
    "listPrices",
    "listProjects",
    "listRuntimes",
    "listSecrets",
    "listSessions",
    "listSkus",
    "listWebhookDeliveries",
    "listWebhooks",
    "streamEvents",
    "streamInvocation",
    "whoami",
}
BODIES: dict[str, Any] = {
    "createAllocation": {"sku": "g1.1"},
    "createGpuUnit": {
        "operationID": "o",
        "name": "canary-unit",
        "specName": "g1.1",
        "serverless": {"enabled": True, "requestID": "canary-unit"},
    },
    "updateGpuUnit": {
        "operationID": "u",
        "name": CANARY,
        "specName": "g1.1",
        "serverless": {"enabled": True, "requestID": "canary-unit"},
    },
    "createInvocation": {"serverlessRequestID": "canary-unit"},
    "mapFunction": {"payloads": [1]},
    "putFunction": {"sku": "g1.1"},
    "rollbackFunction": {},
    "createGroupMapping": {"group": "g", "role": "viewer", "project_id": f"prj_{UNKNOWN}"},
    "createSession": {"token": "a.b.c"},
    "putBudget": {"period": "daily", "limit_microusd": 5, "action": "warn"},
    "putIdentityProvider": {"issuer": "https://id.example", "client_id": "c"},
    "createCorrection": {"transfer_id": "usage/x", "amount_microusd": 1, "memo": "m"},
    "createEnrolmentToken": {"node_name": "stranger"},
    "createGrant": {"organisation_id": f"org_{UNKNOWN}", "amount_microusd": 1, "memo": "m"},
    "createKey": {"name": "k", "role": "viewer"},
    "createOrganisation": {"name": "o"},
    "createProject": {"name": "p"},
    "createServiceAccount": {"name": "s", "role": "viewer"},
    "createWebhook": {"url": "https://8.8.8.8/hook"},
    "createUser": {"issuer": "i", "subject": "s", "display_name": "d"},
    "putBillingTerms": {"credit_limit_microusd": 1},
    "putEgress": {"rules": ["pypi.org"]},
    "putMember": {"role": "viewer"},
    "putObject": {"any": "bytes"},
    "putPrice": {"price_microusd": 1, "per": 1},
    "putQuota": {"gpus_max": 1},
    "createTopup": {"amount_microusd": 1_000_000},
    "createRefund": {"payment_id": f"pay_{UNKNOWN}", "amount_microusd": 10_000, "reason": "r"},
    "acceptProviderEvent": {"reason": "r"},
    "discardProviderEvent": {"reason": "r"},
    "putRuntime": {"lock": "a==1 --hash=sha256:" + "0" * 64},
    "putSecret": {"value": "v"},
    "putSku": SKU,
    "updateSku": {"description": "one"},
    "putStock": {"floor": 1},
    "releaseAllocation": {},
    "updateAllocation": {"name": "n"},
    "updateProject": {"name": "n"},
    "updateWebhook": {"enabled": True},
    "forceSlotCleanup": {"runtime_verified_absent": True},
    "quarantineGpu": {"reason": "r"},
    **{order: {} for order in ("cordonNode", "uncordonNode", "drainNode", "revokeNode", "retireNode")},
}
PREFIXES = {
    "project_id": "prj",
    "key_id": "key",
    "account_id": "sva",
    "principal_id": "usr",
    "allocation_id": "alc",
    "node_id": "nod",
    "slot_id": "slt",
    "event_id": "evt",
    "session_id": "ses",
    "budget_id": "bdg",
    "mapping_id": "map",
    "user_id": "usr",
    "organisation_id": "org",
    "payment_id": "pay",
    "refund_id": "rfd",
    "webhook_id": "whk",
    "delivery_id": "dlv",
    "letter_id": "dlt",
}


@dataclass(frozen=True)
class Operation:
    """One route."""

    id: str
    method: str
    path: str
    public: bool
    has_body: bool

    @property
    def parameters(self) -> list[str]:
        """The ids in its path."""
        return re.findall(r"{(\w+)}", self.path)

    def at(self, ids: dict[str, str]) -> str:
        """Its path below /api/v1 with these ids; what is not among them is unknown to everyone."""
        given = {name: ids.get(name, f"{PREFIXES.get(name, 'xxx')}_{UNKNOWN}") for name in self.parameters}
        return self.path.removeprefix("/api/v1").format(**given)


@pytest.fixture(scope="package")
async def operations(api: Api) -> list[Operation]:
    async with api.session.get(f"http://127.0.0.1:{api.port}/api/openapi.json") as response:
        document = await response.json(content_type=None)
    return [
        Operation(inner["operationId"], method.upper(), path, inner.get("security") == [], "requestBody" in inner)
        for path, methods in document["paths"].items()
        for method, inner in methods.items()
    ]


@pytest.fixture(scope="package")
async def objects(api: Api, people: People) -> dict[str, str]:
    """The ids of things that are in the home project, all with the canary in their name."""
    home = {"Penstock-Project": people.owner.project_id}
    account = await made(api, "/service-accounts", {"name": CANARY, "role": "viewer"}, **home)
    key = await made(api, "/keys", {"name": CANARY, "role": "viewer", "service_account_id": account["id"]}, **home)
    allocation = await made(
        api, "/allocations", {"sku": "g1.1", "name": CANARY, "wait_s": 600, "labels": {"l": CANARY}}, **home
    )
    secret = await api.call("PUT", "/secrets/g1.1", json={"value": CANARY}, headers=home)
    assert secret.status == 200, secret.content
    runtime = await api.call("PUT", "/runtimes/g1.1", json=BODIES["putRuntime"], headers=home)
    assert runtime.status == 200, runtime.content
    price = await api.call("PUT", "/billing/prices/g1.1", json=BODIES["putPrice"])
    assert price.status == 200, price.content
    content = await api.call("PUT", f"/objects/{CANARY}", json={"any": "bytes"}, headers=home)
    assert content.status == 200, content.content
    webhook = await made(api, "/webhooks", {"url": f"https://8.8.8.8/{CANARY}"}, **home)
    delivery = await made(api, f"/webhooks/{webhook['webhook']['id']}/test", {}, **home)
    budget = await api.call("PUT", "/billing/budgets", json=BODIES["putBudget"], headers=home)
    assert budget.status == 200, budget.content
    token = await made(api, "/nodes/enrolment-tokens", {"node_name": CANARY})
    unit = await made(api, "/gpu-units", BODIES["createGpuUnit"] | {"name": CANARY}, **home)
    letter = await _invoked(api, people.owner.project_id)
    return {
        "unit": unit["data"]["name"],
        "function": "canary-unit",
        "invocation_id": f"{CANARY}-1",
        "letter_id": letter,
        "project_id": people.owner.project_id,
        "account_id": account["id"],
        "principal_id": account["id"],
        "key_id": key["key"]["id"],
        "allocation_id": allocation["id"],
        "webhook_id": webhook["webhook"]["id"],
        "delivery_id": delivery["id"],
        "node_id": token["node_id"],
        "budget_id": budget.json["id"],
        "name": "g1.1",
        "key": CANARY,
    }


async def _invoked(api: Api, project_id: str) -> str:
    """An invocation of the home project that has ended, and the id of a dead letter."""
    body = {"serverlessRequestID": "canary-unit", "invocationID": f"{CANARY}-1", "payload": CANARY}
    answer = await api.call("POST", "/serverless/invocations", json=body, headers={"Penstock-Project": project_id})
    assert answer.status == 202, answer.content
    letter = f"dlt_{'1' * 26}"
    conn = await asyncpg.connect(api.database_url)
    await conn.execute(
        "update serverless.invocations set waiting = false, state = 'succeeded', finished_at = clock_timestamp(),"
        f" result = '\"{CANARY}\"', result_type = 'application/json' where project_id = $1",
        project_id,
    )
    await conn.execute(
        "insert into serverless.dead_letters (id, project_id, function_name, source, failure_class, error, subject,"
        " payload) values ($1, $2, 'canary-unit', 'invocation', 'retry_exhausted', $3, '', '')",
        letter,
        project_id,
        CANARY,
    )
    await conn.close()
    return letter


async def send(api: Api, operation: Operation, ids: dict[str, str], key: str) -> tuple[int, Any]:
    """Status and body without what differs by nature; streams are read for a moment."""
    if operation.id == "streamEvents" and key:
        return await peek(api, operation.at(ids), key)
    if operation.has_body and operation.id not in BODIES:
        pytest.fail(f"add a sample body for {operation.id}")
    answer = await api.call(operation.method, operation.at(ids), key=key, json=BODIES.get(operation.id))
    body = answer.json
    if answer.status >= 400:
        assert answer.error.pop("correlation_id")
        # A refusal names what was asked for.
        asked = {*operation.at(ids).split("/")} - {*operation.path.split("/")}
        for name in sorted(asked, key=len, reverse=True):
            answer.error["message"] = answer.error["message"].replace(name, "?")
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

"""A really running api process on a database of its own, and people with keys of all sorts."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest

from conftest import Servers, fresh_database
from penstock.billing.service.welcome import welcome
from penstock.embedded.child import free_port
from penstock.fleet import pki
from penstock.identity.bootstrap import bootstrap
from penstock.identity.model import DEFAULT_ORGANISATION
from penstock.kit import db
from penstock.secrets import keyring

from .operations import BODIES, CANARY, SKU, Operation

PAYMENTS_SECRET = "whsec_the_secret_of_now"
PAYMENTS_SECRET_BEFORE = "whsec_the_secret_of_before"


@dataclass
class Answer:
    """What the server said."""

    status: int
    headers: dict[str, str]
    content: bytes
    json: Any

    @property
    def error(self) -> dict[str, Any]:
        """The envelope's inside."""
        assert set(self.json) == {"error"}, self.json
        assert {"code", "message", "correlation_id"} <= set(self.json["error"])
        return self.json["error"]


@dataclass
class Api:
    """The running process and how to talk to it."""

    port: int
    database_url: str
    admin_key: str
    process: asyncio.subprocess.Process
    log: Path
    session: aiohttp.ClientSession = field(repr=False)

    async def call(
        self,
        method: str,
        path: str,
        *,
        key: str | None = None,
        json: Any = None,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """One request below /api/v1; `key` defaults to the administrator's, empty sends none."""
        secret = self.admin_key if key is None else key
        sent = {"Authorization": f"Bearer {secret}"} if secret else {}
        if body is not None:
            sent["Content-Type"] = "application/json"
        url = f"http://127.0.0.1:{self.port}/api/v1{path}"
        async with self.session.request(
            method, url, json=json, data=body, headers={**sent, **(headers or {})}
        ) as response:
            content = await response.read()
            is_json = response.headers.get("Content-Type", "").startswith("application/json")
            parsed = await response.json() if content and is_json else None
            return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, content, parsed)

    async def raw(self, request: bytes, *, timeout_s: float = 12.0) -> tuple[bytes, bool]:
        """Send bytes as they are; all that came back, and whether the server closed the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        received = b""
        try:
            writer.write(request)
            await writer.drain()
            async with asyncio.timeout(timeout_s):
                while chunk := await reader.read(65536):
                    received += chunk
            return received, True
        except TimeoutError:
            return received, False
        except ConnectionResetError:
            return received, True
        finally:
            writer.close()


@pytest.fixture(scope="package")
async def api(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    """The api, bootstrapped, with one SKU."""
    async with fresh_database(servers) as database_url, _running(servers, database_url, tmp_path_factory) as running:
        yield running


@asynccontextmanager
async def _running(servers: Servers, database_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    async with db.connect(database_url, lambda *_: None) as database, database.transaction() as tx:
        admin_key = await bootstrap(tx)
        await welcome(tx, DEFAULT_ORGANISATION)
    assert admin_key is not None
    folder = tmp_path_factory.mktemp("api")
    pki.init(folder / "pki", ["127.0.0.1"])
    keyring.init(folder / "secrets")
    async with aiohttp.ClientSession() as session:
        running = await _start(servers, database_url, admin_key, folder, session)
        try:
            answer = await running.call("PUT", "/skus/g1.1", json=SKU)
            assert answer.status == 200, answer.content
            yield running
        finally:
            if running.process.returncode is None:
                running.process.terminate()
                await asyncio.wait_for(running.process.wait(), 30)


async def _start(servers: Any, database_url: str, admin_key: str, folder: Path, session: aiohttp.ClientSession) -> Api:
    port = free_port()
    log = folder / "api.log"
    environment = {
        **os.environ,
        "PENSTOCK_DATABASE_URL": database_url,
        "PENSTOCK_NATS_URL": servers.nats_url,
        "PENSTOCK_PKI_DIR": str(folder / "pki"),
        "PENSTOCK_SECRETS_DIR": str(folder / "secrets"),
        "PENSTOCK_OBJECTS_URL": (folder / "objects").as_uri(),
        "PENSTOCK_API_PORT": str(port),
        "PENSTOCK_API_URL": f"http://127.0.0.1:{port}",
        "PENSTOCK_PAYMENTS_PROVIDER": "local",
        "PENSTOCK_PAYMENTS_WEBHOOK_SECRET": PAYMENTS_SECRET,
        "PENSTOCK_PAYMENTS_WEBHOOK_SECRET_PREVIOUS": PAYMENTS_SECRET_BEFORE,
        "PENSTOCK_PAYMENTS_WEBHOOK_PREVIOUS_UNTIL": "2026-01-01T00:00:00Z",
        "PENSTOCK_API_OPS_PORT": "0",
    }
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "from penstock.processes.api import main; main()",
            env=environment,
            stdout=output,
            stderr=output,
        )
    running = Api(port, database_url, admin_key, process, log, session)
    for _ in range(1200):
        if process.returncode is not None:
            raise RuntimeError(log.read_text())
        try:
            async with session.get(f"http://127.0.0.1:{port}/readyz") as response:
                if response.status == 200:
                    return running
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.05)
    raise RuntimeError(log.read_text())


@dataclass(frozen=True)
class Person:
    """A key and where it works."""

    key: str
    key_id: str
    project_id: str


@dataclass(frozen=True)
class People:
    """Who there is: a project with members of all roles, a sister project, and a stranger's organisation."""

    owner: Person
    admin: Person
    developer: Person
    viewer: Person
    sister: Person
    stranger: Person
    revoked: Person


@pytest.fixture(scope="package")
async def people(api: Api) -> People:
    """Made through the api itself."""
    home = await made(api, "/projects", {"name": "home"})
    sister = await made(api, "/projects", {"name": "sister"})
    elsewhere = await made(api, "/organisations", {"name": "elsewhere"})
    strange = await made(api, "/projects", {"name": "strange", "organisation_id": elsewhere["id"]})
    roles = {role: await person(api, home["id"], role) for role in ("owner", "admin", "developer", "viewer")}
    revoked = await person(api, home["id"], "owner")
    answer = await api.call("DELETE", f"/keys/{revoked.key_id}", headers={"Penstock-Project": home["id"]})
    assert answer.status == 204
    return People(
        **roles,
        sister=await person(api, sister["id"], "owner"),
        stranger=await person(api, strange["id"], "owner"),
        revoked=revoked,
    )


async def made(api: Api, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """The object that a create answered."""
    answer = await api.call("POST", path, json=body, headers=headers)
    assert answer.status == 201, answer.content
    return answer.json


async def person(api: Api, project_id: str, role: str) -> Person:
    """A service account of this role with a key."""
    there = {"Penstock-Project": project_id}
    account = await made(api, "/service-accounts", {"name": f"sa {role}", "role": role}, **there)
    key = await made(api, "/keys", {"name": f"key {role}", "role": role, "service_account_id": account["id"]}, **there)
    return Person(key["secret"], key["key"]["id"], project_id)


@pytest.fixture(scope="package")
async def operations(api: Api) -> list[Operation]:
    """All routes, by the document of the running server."""
    async with api.session.get(f"http://127.0.0.1:{api.port}/api/openapi.json") as response:
        document = await response.json(content_type=None)
    return [
        Operation(inner["operationId"], method.upper(), path, inner.get("security") == [], "requestBody" in inner)
        for path, methods in document["paths"].items()
        if "servers" not in methods  # the gateway's
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
    resolution = await api.call("POST", "/resolutions", json=BODIES["createResolution"], headers=home)
    assert resolution.status == 202, resolution.content
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
        "resolution_id": resolution.json["id"],
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

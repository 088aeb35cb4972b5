"""Functions' code: for the node that has the worker's allocation, over mTLS, whole and unchanged."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from integration.fleet.agent import Agent
from integration.fleet.conftest import Enrol, StartGateway
from penstock.fleet import pki
from penstock.fleet.codeserver import CodeServer
from penstock.flows.unitcode import UnitCode
from penstock.kit.audit import Actor
from penstock.kit.db import Database, Reader
from penstock.kit.errors import PenstockError
from penstock.kit.ids import new_id
from penstock.node.codes import Codes as NodeCodes
from penstock.node.codes import FromGateway
from penstock.node.errors import Failed
from penstock.serverless.service.codes import Codes
from penstock.storage import blobs
from penstock.storage.blobs import Access
from penstock.storage.model import Limits
from penstock.storage.service import Objects, Wanted
from penstock.wire.tasks import Code

ALLOCATION = new_id("alc")
CONTENT = bytes(range(256)) * 4000
CODE = Code(sha256=hashlib.sha256(CONTENT).hexdigest(), bytes=len(CONTENT))
_ACTOR = Actor(id="usr_default", kind="user", organisation_id="org_default", project_id="prj_default")


class Places:
    """Where units are, as the test says."""

    def __init__(self) -> None:
        self.nodes: dict[str, str] = {}

    async def node(self, conn: Reader, allocation_id: str) -> str | None:
        """What the test put there."""
        return self.nodes.get(allocation_id)


async def _put(objects: Objects, content: bytes) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield content

    await objects.put("prj_default", "code/echo.tar.gz", pieces(), actor=_ACTOR, wanted=Wanted(size=len(content)))


async def _make_worker(database: Database) -> None:
    async with database.transaction() as tx:
        await tx.execute(
            """
            with made as (
                insert into serverless.functions (id, project_id, organisation_id, name, current_version,
                    serving_version, created_by, created_kind)
                values ('fun_1', 'prj_default', 'org_default', 'echo', 1, 1, 'usr_default', 'user') returning id
            ), version as (
                insert into serverless.versions (function_id, number, definition, digest, slots, tasks_per_worker,
                    workers_min, workers_max, idle_s, timeout_s, retries, retry_for, created_by)
                select id, 1, $2::jsonb, '', 1, 1, 0, 1, 1, 1, 0, '{}', 'usr_default' from made
            )
            insert into serverless.workers (id, function_id, project_id, request, version, allocation_id, state, slots,
                token_hash, mac_key, lease_until)
            select 'w', id, 'prj_default', 'echo', 1, $1, 'starting', 1, '', '', now() from made
            """,
            ALLOCATION,
            {"code": {"object": "code/echo.tar.gz", "sha256": CODE.sha256}},
        )


@pytest.fixture
async def objects(database: Database, tmp_path: Path) -> Objects:
    """With the code of the function that has a worker."""
    made = Objects(database, blobs.connect(Access(url=(tmp_path / "objects").as_uri())), Limits())
    await _put(made, CONTENT)
    await _make_worker(database)
    return made


@pytest.fixture
def places() -> Places:
    """No unit is anywhere."""
    return Places()


@pytest.fixture
async def listener(
    start_gateway: StartGateway, database: Database, objects: Objects, places: Places, folder: Path
) -> AsyncIterator[URL]:
    """The mTLS listener that serves code."""
    gateway = await start_gateway()
    app = web.Application()
    server = CodeServer(gateway.server.peers, UnitCode(database, places, Codes(), objects))  # pyright: ignore[reportArgumentType]
    server.add_routes(app)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=pki.server_context(folder)).start()
    host, port = runner.addresses[0][:2]
    yield URL(f"https://{host}:{port}")
    await runner.cleanup()


class Node:
    """As much of an identity as a fetch needs."""

    def __init__(self, listener: URL, folder: Path, name: str) -> None:
        self._listener = listener
        self._folder = folder
        self._name = name

    def url(self, path: str) -> URL:
        """At the listener."""
        return self._listener / path

    def tls(self):
        """With the node's certificate."""
        return Agent.tls(self._folder, self._name)


async def test_the_nodes_worker_gets_its_code(listener: URL, enrol: Enrol, places: Places, tmp_path: Path) -> None:
    places.nodes[ALLOCATION] = (await enrol("n1")).node_id
    fetch = FromGateway(Node(listener, tmp_path, "n1")).fetch  # pyright: ignore[reportArgumentType]
    codes = NodeCodes(tmp_path / "codes", fetch, bytes_max=1 << 30)
    assert (await codes.get(CODE, ALLOCATION)).read_bytes() == CONTENT


async def test_another_node_and_another_object_get_none(
    listener: URL, enrol: Enrol, places: Places, objects: Objects, tmp_path: Path
) -> None:
    places.nodes[ALLOCATION] = (await enrol("n1")).node_id
    await enrol("n2")
    stranger = FromGateway(Node(listener, tmp_path, "n2")).fetch  # pyright: ignore[reportArgumentType]
    with pytest.raises(Failed) as failed:
        await NodeCodes(tmp_path / "codes", stranger, bytes_max=1 << 30).get(CODE, ALLOCATION)
    assert failed.value.code == "code_refused"
    await _put(objects, b"something else")
    own = FromGateway(Node(listener, tmp_path, "n1")).fetch  # pyright: ignore[reportArgumentType]
    with pytest.raises(Failed) as failed:
        await NodeCodes(tmp_path / "codes", own, bytes_max=1 << 30).get(CODE, ALLOCATION)
    assert failed.value.code == "code_refused"


async def test_bad_questions_are_answered(
    listener: URL, enrol: Enrol, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    await enrol("n1")
    for name, status in (("no-id", 400), (new_id("alc"), 404), (f"{ALLOCATION}%00", 400)):
        url = URL(f"{listener}/code/{name}", encoded=True)
        async with session.get(url, ssl=Agent.tls(tmp_path, "n1")) as response:
            assert response.status == status
            assert (await response.json())["error"]["code"]


async def test_code_of_a_worker_that_is_gone_is_nobodys(database: Database, objects: Objects, places: Places) -> None:
    places.nodes[ALLOCATION] = "nod_x"
    async with database.transaction() as tx:
        await tx.execute("update serverless.workers set state = 'gone'")
    with pytest.raises(PenstockError, match="no unit with such code"):
        await UnitCode(database, places, Codes(), objects).open(node_id="nod_x", allocation_id=ALLOCATION)  # pyright: ignore[reportArgumentType]

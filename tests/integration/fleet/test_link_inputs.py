"""The rows of bad_inputs.csv on the node link that concern the gateway, by their ids."""

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path

import aiohttp
import msgspec
import pytest
from structlog.testing import capture_logs

from integration.fleet.agent import Agent, inventory, new_key, request_for
from integration.fleet.conftest import Connect, Enrol, Gateway, StartGateway
from penstock.fleet import pki
from penstock.fleet.pki import Authority
from penstock.fleet.sweeper import Sweeper
from penstock.fleet.tasks import Tasks
from penstock.kit.db import Database
from penstock.kit.ids import new_id
from penstock.wire.link import FRAME_BYTES_MAX, Ask, HeartbeatAck, ResultVerdict, UnitReport, UnitState
from penstock.wire.rest import Enrolled
from penstock.wire.tasks import HEALTH_PROBE, HealthProbe, HealthReport

REPORT = HealthReport(sandbox="bubblewrap", units=[], disk_free_bytes=1, memory_free_bytes=1)


async def probe(database: Database, tasks: Tasks, node_id: str, *, fence: int = 1, key: str = "probe") -> str:
    async with database.transaction() as tx:
        return await tasks.dispatch(
            tx,
            node_id=node_id,
            type=HEALTH_PROBE,
            allocation_id="alc_default",
            fence=fence,
            params=HealthProbe(),
            dedupe_key=key,
            expires_s=60,
        )


async def test_runner_ws_01_no_client_certificate_no_handshake(
    gateway: Gateway, session: aiohttp.ClientSession, folder: Path
) -> None:
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    with pytest.raises((aiohttp.ClientError, OSError)) as caught:
        await session.ws_connect(f"{gateway.url}/link", ssl=context)
    assert not isinstance(caught.value, aiohttp.WSServerHandshakeError)


async def test_runner_ws_02_certificate_of_another_ca_no_handshake(
    gateway: Gateway, session: aiohttp.ClientSession, folder: Path, tmp_path: Path, enrol: Enrol
) -> None:
    enrolled = await enrol()
    pki.init(tmp_path / "other", ["127.0.0.1"])
    key = new_key()
    issued = Authority.load(tmp_path / "other").sign_csr(request_for(key, "n1"), enrolled.node_id)
    forged = msgspec.structs.replace(enrolled, certificate_pem=issued.certificate_pem)
    Agent.save(tmp_path, "forged", forged, key)
    with pytest.raises((aiohttp.ClientError, OSError)) as caught:
        await session.ws_connect(f"{gateway.url}/link", ssl=Agent.tls(tmp_path, "forged"))
    assert not isinstance(caught.value, aiohttp.WSServerHandshakeError)


async def test_the_agent_takes_no_other_server_for_the_gateway(
    gateway: Gateway, session: aiohttp.ClientSession, tmp_path: Path, enrol: Enrol
) -> None:
    await enrol()
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await session.get(f"{gateway.url}/link", ssl=Agent.tls(tmp_path, "n1"), server_hostname="elsewhere.example")


async def test_a_certificate_of_our_ca_that_was_never_issued_is_refused(
    gateway: Gateway, session: aiohttp.ClientSession, folder: Path, tmp_path: Path, enrol: Enrol
) -> None:
    enrolled = await enrol()
    key = new_key()
    issued = Authority.load(folder).sign_csr(request_for(key, "n1"), enrolled.node_id)
    unknown = msgspec.structs.replace(enrolled, certificate_pem=issued.certificate_pem)
    Agent.save(tmp_path, "unknown", unknown, key)
    socket = await session.ws_connect(f"{gateway.url}/link", ssl=Agent.tls(tmp_path, "unknown"))
    assert (await socket.receive(timeout=30)).data == 4401


async def test_the_certificate_is_not_read_from_a_header(
    gateway: Gateway, session: aiohttp.ClientSession, folder: Path, enrol: Enrol
) -> None:
    """A gateway's own certificate is good for TLS and is no node's, whatever headers say."""
    enrolled = await enrol()
    headers = {"X-Client-Cert": enrolled.certificate_pem.replace("\n", ""), "X-Node-Id": enrolled.node_id}
    socket = await session.ws_connect(f"{gateway.url}/link", ssl=pki.peer_context(folder), headers=headers)
    assert (await socket.receive(timeout=30)).data == 4401


async def test_runner_ws_05_certificate_of_one_node_hello_of_another(connect: Connect, enrol: Enrol) -> None:
    await enrol("n1")
    other = await enrol("n2")
    agent = await connect("n1")
    await agent.send(agent.hello(node_id=other.node_id))
    closed = await agent.closed()
    assert closed.code == 4403
    assert "identity_mismatch" in closed.reason


@pytest.mark.parametrize("version", [99, 0])
async def test_runner_ws_07_and_08_unknown_protocol_version(connect: Connect, enrol: Enrol, version: int) -> None:
    await enrol()
    agent = await connect()
    await agent.send(agent.hello(protocol_version=version))
    closed = await agent.closed()
    assert (closed.code, closed.reason) == (4426, "supported versions: 1")


async def test_runner_ws_09_the_older_of_two_links_is_closed(
    connect: Connect, enrol: Enrol, database: Database, tasks: Tasks
) -> None:
    enrolled = await enrol()
    older = await connect()
    await older.join()
    newer = await connect()
    await newer.join()
    assert (await older.closed()).code == 4409
    await probe(database, tasks, enrolled.node_id)
    assert (await newer.task()).node_id == enrolled.node_id


async def test_runner_ws_09_the_older_link_is_closed_on_another_gateway_too(
    connect: Connect, enrol: Enrol, start_gateway: StartGateway, database: Database
) -> None:
    enrolled = await enrol()
    older = await connect()
    await older.join()
    second = await start_gateway("gtw_2")
    newer = await connect(url=second.url)
    await newer.join()
    closed = await older.closed(timeout=30)
    assert closed.code == 4409
    await asyncio.sleep(0.1)
    async with database.read() as conn:
        row = await conn.fetchrow("select gateway_id from fleet.links where node_id = $1", enrolled.node_id)
    assert row is not None
    assert row["gateway_id"] == "gtw_2"


async def test_runner_ws_10_replayed_nonce(connect: Connect, enrol: Enrol) -> None:
    await enrol()
    first = await connect()
    await first.join()
    second = await connect()
    await second.send(second.hello(nonce=first.nonce))
    assert (await second.closed()).code == 4401


async def test_runner_ws_12_more_gpus_than_approved(connect: Connect, enrol: Enrol, database: Database) -> None:
    enrolled = await enrol(gpus_approved=2)
    agent = await connect()
    with capture_logs() as logs:
        welcome = await agent.join(gpus=4)
    assert welcome.slots_approved == 2
    assert [log["reported"] for log in logs if log["event"] == "capacity_above_approved"] == [4]
    async with database.read() as conn:
        slots = await conn.fetch("select gpu_uuid from fleet.placeable_slots order by gpu_index")
        facts = await conn.fetchval(
            "select count(*) from kit.outbox where type = 'fleet.node_capacity_exceeded' and aggregate_id = $1",
            enrolled.node_id,
        )
    assert [slot["gpu_uuid"] for slot in slots] == ["GPU-0", "GPU-1"]
    assert facts == 1


async def test_runner_ws_13_result_for_a_task_never_dispatched(
    connect: Connect, enrol: Enrol, database: Database, tasks: Tasks
) -> None:
    enrolled, other = await enrol("n1"), await enrol("n2")
    theirs = await probe(database, tasks, other.node_id)
    agent = await connect()
    await agent.join(ask=0)
    unsent = await probe(database, tasks, enrolled.node_id, key="unsent")
    for task_id in (new_id("tsk"), theirs, unsent):
        assert (await agent.answer(task_id, 1, REPORT)).verdict is ResultVerdict.UNKNOWN_TASK
    async with database.read() as conn:
        assert await tasks.outcome(conn, theirs) is None
        assert await tasks.outcome(conn, unsent) is None


async def test_runner_ws_15_result_twice(connect: Connect, enrol: Enrol, database: Database, tasks: Tasks) -> None:
    enrolled = await enrol()
    agent = await connect()
    await agent.join()
    task_id = await probe(database, tasks, enrolled.node_id)
    assert (await agent.task()).task_id == task_id
    assert (await agent.answer(task_id, 1, REPORT)).verdict is ResultVerdict.APPLIED
    changed = msgspec.structs.replace(REPORT, sandbox="other")
    assert (await agent.answer(task_id, 1, changed)).verdict is ResultVerdict.DUPLICATE
    async with database.read() as conn:
        outcome = await tasks.outcome(conn, task_id)
    assert outcome is not None
    assert outcome.decode(HealthReport) == REPORT


async def test_runner_ws_17_result_under_an_older_fence(
    connect: Connect, enrol: Enrol, database: Database, tasks: Tasks
) -> None:
    enrolled = await enrol()
    agent = await connect()
    await agent.join()
    old = await probe(database, tasks, enrolled.node_id, fence=1, key="old")
    assert (await agent.task()).task_id == old
    new = await probe(database, tasks, enrolled.node_id, fence=2, key="new")
    assert (await agent.task()).task_id == new
    assert (await agent.answer(old, 1, REPORT)).verdict is ResultVerdict.STALE_GENERATION
    assert (await agent.answer(new, 1, REPORT)).verdict is ResultVerdict.STALE_GENERATION
    async with database.read() as conn:
        ended, open_still = await tasks.outcome(conn, old), await tasks.outcome(conn, new)
    assert ended is not None
    assert (ended.state, ended.error_code) == ("expired", "stale_fence")
    assert open_still is None
    assert (await agent.answer(new, 2, REPORT)).verdict is ResultVerdict.APPLIED


async def test_runner_ws_36_clock_an_hour_ahead(connect: Connect, enrol: Enrol, database: Database) -> None:
    enrolled = await enrol()
    agent = await connect()
    await agent.join()
    with capture_logs() as logs:
        await agent.beat(ahead_s=3600)
        await agent.expect(HeartbeatAck)
    assert [round(log["skew_s"], -1) for log in logs if log["event"] == "node_clock_skewed"] == [3600]
    async with database.read() as conn:
        row = await conn.fetchrow(
            "select abs(extract(epoch from now() - at)) as age_s, skew_s from fleet.heartbeats where node_id = $1",
            enrolled.node_id,
        )
    assert row is not None
    assert row["age_s"] < 5
    assert abs(row["skew_s"] - 3600) < 5


async def state_of(database: Database, enrolled: Enrolled) -> str:
    async with database.read() as conn:
        return await conn.fetchval("select state from fleet.nodes where id = $1", enrolled.node_id)


async def test_runner_ws_37_silence_of_three_intervals(
    connect: Connect, enrol: Enrol, database: Database, sweeper: Sweeper, tasks: Tasks
) -> None:
    enrolled = await enrol()
    agent = await connect()
    await agent.join()
    task_id = await probe(database, tasks, enrolled.node_id)
    await agent.task()
    await sweeper.sweep_nodes()
    assert await state_of(database, enrolled) == "ready"
    await asyncio.sleep(1.6)
    await sweeper.sweep_nodes()
    assert await state_of(database, enrolled) == "unreachable"
    async with database.read() as conn:
        assert await conn.fetch("select * from fleet.placeable_slots") == []
    await agent.beat(units=[UnitReport(unit_id="alc_1", state=UnitState.RUNNING)])
    await agent.expect(HeartbeatAck)
    await sweeper.sweep_nodes()
    assert await state_of(database, enrolled) == "ready"
    assert (await agent.answer(task_id, 1, REPORT)).verdict is ResultVerdict.APPLIED


@pytest.mark.parametrize("size", [16 << 20, FRAME_BYTES_MAX + 1])
async def test_runner_ws_39_too_big_a_frame(connect: Connect, enrol: Enrol, size: int) -> None:
    await enrol()
    agent = await connect()
    await agent.join()
    with suppress(aiohttp.ClientError, OSError):  # the gateway does not read it to its end
        await agent.socket.send_bytes(b"\x81" * size)
    assert (await agent.closed()).code == 1009


async def test_a_frame_of_the_largest_size_is_read(connect: Connect, enrol: Enrol) -> None:
    await enrol()
    agent = await connect()
    await agent.join()
    await agent.socket.send_bytes(b"\x81" * FRAME_BYTES_MAX)
    assert (await agent.closed()).code == 4400


MANY_KEYS = {f"key{number}": number for number in range(100_000)}


RUBBISH: list[str | bytes] = [
    msgspec.json.encode(MANY_KEYS).decode(),
    msgspec.json.encode(MANY_KEYS),
    msgspec.msgpack.encode(MANY_KEYS),
    b"",
    b"\xc1",
    b"\x81\xa4type\xa8hello.v1",
    msgspec.msgpack.encode(Ask(count=-1)),
]


@pytest.mark.parametrize("joined", [False, True], ids=["as_hello", "later"])
async def test_runner_ws_40_rubbish(connect: Connect, enrol: Enrol, joined: bool) -> None:
    await enrol()
    for data in RUBBISH:
        agent = await connect()
        if joined:
            await agent.join()
        if isinstance(data, str):
            await agent.socket.send_str(data)
        else:
            await agent.socket.send_bytes(data)
        assert (await agent.closed()).code == 4400, data[:40]
    again = await connect()
    assert (await again.join()).heartbeat_s == 0.5


async def test_a_second_hello_is_malformed(connect: Connect, enrol: Enrol) -> None:
    await enrol()
    agent = await connect()
    await agent.join()
    await agent.send(agent.hello(inventory=inventory(1)))
    assert (await agent.closed()).code == 4400

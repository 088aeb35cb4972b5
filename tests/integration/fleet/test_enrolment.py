"""A token works once, for its node, for ten minutes; certificates are renewed with themselves and revoked at once."""

import asyncio
import contextlib
import time
from pathlib import Path

import aiohttp
import msgspec
import pytest
from cryptography import x509

from integration.fleet.agent import Agent, new_key, request_for
from integration.fleet.conftest import Connect, Enrol, Gateway
from penstock.fleet.enrolment import CERTIFICATES_MAX, Addresses, Enrolment
from penstock.fleet.errors import BadRequest, IllegalMove, NameTaken, TokenRefused, TooMany
from penstock.fleet.model import Config
from penstock.fleet.nodes import Nodes
from penstock.fleet.sweeper import Sweeper
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.kit.errors import Denied, PenstockError
from penstock.wire.link import HeartbeatAck
from penstock.wire.rest import Enrolled, EnrolmentToken

CSR = request_for(new_key(), "n1")


@pytest.fixture
async def token(database: Database, enrolment: Enrolment, operator: Caller) -> EnrolmentToken:
    """A fresh token for n1."""
    async with database.transaction() as tx:
        return await enrolment.create_token(tx, operator, node_name="n1", gpus_approved=8)


async def use(database: Database, enrolment: Enrolment, token: str, name: str = "n1", csr: str = CSR) -> Enrolled:
    async with database.transaction() as tx:
        return await enrolment.enrol(tx, token=token, node_name=name, csr_pem=csr)


async def count(database: Database, query: str, *args: object) -> int:
    async with database.read() as conn:
        return await conn.fetchval(f"select count(*) from {query}", *args)


async def test_fifty_racers_get_one_certificate(
    database: Database, enrolment: Enrolment, token: EnrolmentToken
) -> None:
    results = await asyncio.gather(*(use(database, enrolment, token.token) for _ in range(50)), return_exceptions=True)
    won = [result for result in results if isinstance(result, Enrolled)]
    assert len(won) == 1
    assert all(isinstance(result, TokenRefused) for result in results if result is not won[0])
    assert await count(database, "fleet.certificates") == 1
    assert await count(database, "kit.outbox where type = 'fleet.node_enrolled'") == 1
    assert await count(database, "kit.audit where action = 'nodes.enrol'") == 1


async def test_the_answer_is_the_node_of_the_token(
    database: Database, enrolment: Enrolment, token: EnrolmentToken
) -> None:
    enrolled = await use(database, enrolment, token.token)
    assert enrolled.node_id == token.node_id
    certificate = x509.load_pem_x509_certificate(enrolled.certificate_pem.encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == [f"penstock://node/{token.node_id}"]
    assert len(enrolled.task_keys) == 1
    given, _, command = token.command.partition(" ")
    assert given == f"PENSTOCK_AGENT_ENROLMENT_TOKEN={token.token}"
    assert command == "penstock node join --api http://api.example --name n1", "arguments are seen by everyone"


async def test_only_the_digest_of_a_token_is_kept(database: Database, token: EnrolmentToken) -> None:
    async with database.read() as conn:
        rows = await conn.fetch("select t::text as row from fleet.enrolment_tokens t")
    assert len(rows) == 1
    assert token.token not in rows[0]["row"]


@pytest.mark.parametrize("bad", ["unknown", "other_name", "expired", "bad_csr"])
async def test_a_refused_request_changes_nothing(
    database: Database, enrolment: Enrolment, token: EnrolmentToken, bad: str
) -> None:
    if bad == "expired":
        async with database.read() as conn:
            await conn.execute("update fleet.enrolment_tokens set expires_at = now() - interval '1 second'")
    secret = "ent_unknown" if bad == "unknown" else token.token
    name = "n2" if bad == "other_name" else "n1"
    with pytest.raises(BadRequest if bad == "bad_csr" else TokenRefused) as caught:
        await use(database, enrolment, secret, name, "rubbish" if bad == "bad_csr" else CSR)
    words = {"unknown": "unknown", "other_name": "another name", "expired": "expired", "bad_csr": "csr_pem"}
    assert words[bad] in caught.value.detail
    assert await count(database, "fleet.certificates") == 0
    assert await count(database, "fleet.enrolment_tokens") == 1
    assert await count(database, "fleet.nodes where state = 'pending' and version = 1") == 1
    if bad != "expired":
        assert (await use(database, enrolment, token.token)).node_id == token.node_id


async def test_guesses_are_bounded_and_do_not_keep_a_good_token_out(
    database: Database, enrolment: Enrolment, token: EnrolmentToken
) -> None:
    async def guess() -> None:
        while True:
            with contextlib.suppress(TokenRefused):
                await use(database, enrolment, "ent_guess")

    with pytest.raises(TooMany):
        await asyncio.wait_for(guess(), 20)
    assert (await use(database, enrolment, token.token)).node_id == token.node_id


async def test_a_used_token_is_refused(database: Database, enrolment: Enrolment, token: EnrolmentToken) -> None:
    await use(database, enrolment, token.token)
    with pytest.raises(TokenRefused):
        await use(database, enrolment, token.token)


async def test_asking_again_replaces_the_token_until_the_name_is_taken(
    database: Database, enrolment: Enrolment, operator: Caller, token: EnrolmentToken
) -> None:
    async with database.transaction() as tx:
        second = await enrolment.create_token(tx, operator, node_name="n1", gpus_approved=4)
    assert second.node_id == token.node_id
    with pytest.raises(TokenRefused):
        await use(database, enrolment, token.token)
    await use(database, enrolment, second.token)
    with pytest.raises(NameTaken):
        async with database.transaction() as tx:
            await enrolment.create_token(tx, operator, node_name="n1", gpus_approved=4)


async def test_ten_racers_for_a_name_make_one_node(database: Database, enrolment: Enrolment, operator: Caller) -> None:
    async def ask() -> EnrolmentToken:
        async with database.transaction() as tx:
            return await enrolment.create_token(tx, operator, node_name="n9", gpus_approved=4)

    results = await asyncio.gather(*(ask() for _ in range(10)), return_exceptions=True)
    assert all(isinstance(result, EnrolmentToken | NameTaken) for result in results)
    assert await count(database, "fleet.nodes") == 1
    assert await count(database, "fleet.enrolment_tokens") == 1


async def test_only_operators_make_tokens(database: Database, enrolment: Enrolment, operator: Caller) -> None:
    import dataclasses

    stranger = dataclasses.replace(operator, actions=frozenset({"allocations.create"}), operator=False)
    with pytest.raises(Denied):
        async with database.transaction() as tx:
            await enrolment.create_token(tx, stranger, node_name="n1", gpus_approved=4)


async def renew(
    gateway: Gateway, session: aiohttp.ClientSession, folder: Path, name: str, body: bytes
) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json"}
    tls = Agent.tls(folder, name)
    async with session.post(f"{gateway.url}/renew", data=body, ssl=tls, headers=headers) as answer:
        return answer.status, await answer.read()


async def test_a_node_renews_with_its_own_certificate_and_links_with_the_new_one(
    gateway: Gateway, session: aiohttp.ClientSession, connect: Connect, enrol: Enrol, tmp_path: Path
) -> None:
    first = await enrol()
    key = new_key()
    body = msgspec.json.encode({"csr_pem": request_for(key, "anything")})
    status, answer = await renew(gateway, session, tmp_path, "n1", body)
    assert status == 200
    second = msgspec.json.decode(answer, type=Enrolled)
    assert second.node_id == first.node_id
    assert second.certificate_pem != first.certificate_pem
    Agent.save(tmp_path, "n1-renewed", second, key)
    agent = await connect("n1-renewed")
    assert (await agent.join()).slots_approved == 8


BAD_RENEWALS = [
    b"",
    b"{",
    b"{}",
    b'{"csr_pem": "rubbish"}',
    b'{"csr_pem": 1}',
    b'{"csr_pem": "x", "node_id": "y"}',
    b"x" * (1 << 20),
]


async def test_a_bad_renewal_is_refused_in_the_one_envelope(
    gateway: Gateway, session: aiohttp.ClientSession, enrol: Enrol, tmp_path: Path, database: Database
) -> None:
    await enrol()
    for body in BAD_RENEWALS:
        status, answer = await renew(gateway, session, tmp_path, "n1", body)
        assert status == 400, body[:40]
        assert set(msgspec.json.decode(answer)["error"]) >= {"code", "message", "correlation_id"}
    assert await count(database, "fleet.certificates") == 1


async def test_renewals_are_bounded(
    gateway: Gateway, session: aiohttp.ClientSession, enrol: Enrol, tmp_path: Path, database: Database
) -> None:
    enrolled = await enrol()
    async with database.read() as conn:
        await conn.execute(
            "insert into fleet.certificates (serial, node_id, not_after)"
            " select 'x' || n, $1, now() + interval '1 hour' from generate_series(2, $2) n",
            enrolled.node_id,
            CERTIFICATES_MAX,
        )
    body = msgspec.json.encode({"csr_pem": CSR})
    assert (await renew(gateway, session, tmp_path, "n1", body))[0] == 429


async def test_a_revoked_node_is_out_within_five_seconds_and_its_requests_are_refused_at_once(
    gateway: Gateway,
    session: aiohttp.ClientSession,
    connect: Connect,
    enrol: Enrol,
    nodes: Nodes,
    operator: Caller,
    database: Database,
    sweeper: Sweeper,
    tmp_path: Path,
) -> None:
    enrolled, other = await enrol("n1"), await enrol("n2")
    agent, bystander = await connect("n1"), await connect("n2")
    await agent.join()
    await bystander.join()
    async with database.transaction() as tx:
        await nodes.revoke(tx, operator, enrolled.node_id, "stolen")
    began = time.monotonic()
    closed = await agent.closed()
    assert closed.code == 4401
    assert time.monotonic() - began < 5
    body = msgspec.json.encode({"csr_pem": CSR})
    assert (await renew(gateway, session, tmp_path, "n1", body))[0] == 401
    socket = await session.ws_connect(f"{gateway.url}/link", ssl=Agent.tls(tmp_path, "n1"))
    assert (await socket.receive(timeout=30)).data == 4401
    await sweeper.sweep_nodes()
    assert await count(database, "fleet.nodes where id = $1 and state = 'lost'", enrolled.node_id) == 1
    assert await count(database, "fleet.links where node_id = $1", enrolled.node_id) == 0
    await bystander.beat()
    await bystander.expect(HeartbeatAck)
    assert await count(database, "fleet.nodes where id = $1 and state = 'ready'", other.node_id) == 1


async def test_a_revoked_node_is_out_even_when_no_hint_arrives_and_it_does_not_read(
    connect: Connect, enrol: Enrol, database: Database
) -> None:
    enrolled = await enrol()
    agent = await connect()
    await agent.join()
    async with database.read() as conn:
        await conn.execute("update fleet.certificates set revoked_at = now() where node_id = $1", enrolled.node_id)
    began = time.monotonic()
    while await count(database, "fleet.links where node_id = $1", enrolled.node_id):
        await asyncio.sleep(0.1)
        assert time.monotonic() - began < 5


async def test_heartbeats_of_a_revoked_node_do_not_count(connect: Connect, enrol: Enrol, database: Database) -> None:
    await enrol()
    agent = await connect()
    await agent.join()

    async def last() -> object:
        async with database.read() as conn:
            return await conn.fetchval("select at from fleet.heartbeats")

    before = await last()
    async with database.read() as conn:
        await conn.execute("update fleet.certificates set revoked_at = now()")
    await agent.beat()
    assert (await agent.closed()).code == 4401
    assert await last() == before


async def test_a_heartbeat_in_the_moment_of_revocation_does_not_bring_the_node_back(
    enrol: Enrol, connect: Connect, nodes: Nodes, operator: Caller, database: Database, sweeper: Sweeper
) -> None:
    enrolled = await enrol()
    agent = await connect()
    await agent.join()
    async with database.transaction() as tx:
        await nodes.revoke(tx, operator, enrolled.node_id, "")
    async with database.read() as conn:
        await conn.execute("update fleet.heartbeats set at = clock_timestamp()")
    await sweeper.sweep_nodes()
    assert await count(database, "fleet.nodes where state = 'lost'") == 1


async def test_a_link_closes_when_its_certificate_runs_out(
    database: Database, folder: Path, operator: Caller, connect: Connect, tmp_path: Path
) -> None:
    short = Enrolment(folder, Addresses(api_url="", link_url=""), Config(certificate_s=3))
    async with database.transaction() as tx:
        token = await short.create_token(tx, operator, node_name="n1", gpus_approved=1)
    key = new_key()
    Agent.save(tmp_path, "n1", await use(database, short, token.token, csr=request_for(key, "n1")), key)
    agent = await connect()
    await agent.join()
    assert (await agent.closed(timeout=30)).code == 4401


async def test_recovery_keeps_the_node_and_revokes_what_it_had(
    database: Database, enrolment: Enrolment, operator: Caller, enrol: Enrol, connect: Connect, tmp_path: Path
) -> None:
    first = await enrol()
    old = await connect()
    await old.join()
    async with database.transaction() as tx:
        token = await enrolment.create_recovery_token(tx, operator, first.node_id)
    assert token.kind == "recover"
    key = new_key()
    second = await use(database, enrolment, token.token, csr=request_for(key, "n1"))
    assert second.node_id == first.node_id
    assert (await old.closed()).code == 4401
    Agent.save(tmp_path, "n1-recovered", second, key)
    agent = await connect("n1-recovered")
    await agent.join()
    assert await count(database, "fleet.certificates where revoked_at is null") == 1
    assert await count(database, "fleet.nodes where state = 'ready'") == 1
    with pytest.raises(TokenRefused):
        await use(database, enrolment, token.token)


async def test_pending_and_retired_nodes_are_not_recovered(
    database: Database, enrolment: Enrolment, operator: Caller, nodes: Nodes, token: EnrolmentToken
) -> None:
    async def recover() -> None:
        async with database.transaction() as tx:
            await enrolment.create_recovery_token(tx, operator, token.node_id)

    with pytest.raises(IllegalMove):
        await recover()
    async with database.transaction() as tx:
        await nodes.retire(tx, operator, token.node_id, "")
    with pytest.raises(IllegalMove):
        await recover()
    with pytest.raises(PenstockError):
        await use(database, enrolment, token.token)
    async with database.transaction() as tx:
        again = await enrolment.create_token(tx, operator, node_name="n1", gpus_approved=1)
    assert again.node_id != token.node_id

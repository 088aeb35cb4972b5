"""A node's clock may jump: what has expired, what is renewed and how the link goes on is the gateway's time to say."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from integration.node.test_link import _build, _listening, _running
from node_gateway import Gateway
from penstock.node import identity, renewal
from penstock.node.journal import Journal
from penstock.wire.tasks import TOPOLOGY_DISCOVER, Outcome, TopologyDiscover

STEPS = [timedelta(minutes=10), timedelta(minutes=-10)]
#: Everything on the node that looks at the wall clock.
READERS = ("penstock.node.link.utc_now", "penstock.node.identity.utc_now", "penstock.node.renewal.utc_now")


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Callable[[timedelta], None]:
    """Moves the node's wall clock; the monotonic one goes on as it does on a real host."""

    def move(by: timedelta) -> None:
        for reader in READERS:
            monkeypatch.setattr(reader, lambda: datetime.now(UTC) + by)

    return move


@pytest.mark.parametrize("by", STEPS, ids=["ahead", "behind"])
async def test_a_step_of_the_clock_breaks_neither_link_nor_tasks_nor_certificate(
    node_folder: Path, step: Callable[[timedelta], None], by: timedelta
) -> None:
    async with _listening(Gateway(node_folder)) as gateway:
        gateway.clock_skew = timedelta(0)
        # By the wall clock ten minutes ahead it would be due; by the gateway's it is not.
        gateway.certificate_life_s = 800
        who = await identity.enrol(node_folder / "node", api_url=gateway.api_url, token="good", node_name="local")
        journal = Journal(node_folder / "journal.db")
        agent = _build(who, journal)
        async with _running(agent):
            keeping = asyncio.create_task(renewal.keep(who, agent.link._clock, agent.link))
            before = await asyncio.wait_for(gateway.heartbeats.get(), 20)
            step(by)
            await _stepped(gateway, before.sent_at, by)
            expires = gateway.server_time + timedelta(seconds=30)
            [done] = await gateway.ask(gateway.task(TOPOLOGY_DISCOVER, TopologyDiscover(), expires_at=expires))
            assert done.outcome is Outcome.SUCCEEDED
            over = gateway.server_time - timedelta(seconds=1)
            [late] = await gateway.ask(gateway.task(TOPOLOGY_DISCOVER, TopologyDiscover(), expires_at=over))
            assert (late.outcome, late.error_code) == (Outcome.REFUSED, "expired")
            agent.link.woken.set()
            for _ in range(2):
                await asyncio.wait_for(gateway.heartbeats.get(), 20)
            assert len(gateway.serials) == 1
            assert not keeping.done()
            keeping.cancel()
            await asyncio.wait({keeping})
        journal.close()


async def _stepped(gateway: Gateway, before: datetime, by: timedelta) -> None:
    """The fault has hit: heartbeats go on with the clock that jumped."""
    async with asyncio.timeout(20):
        while abs((await gateway.heartbeats.get()).sent_at - before - by) > timedelta(minutes=5):
            pass


async def test_a_certificate_is_renewed_in_time_though_the_clock_is_behind(
    node_folder: Path, step: Callable[[timedelta], None]
) -> None:
    async with _listening(Gateway(node_folder)) as gateway:
        gateway.clock_skew = timedelta(0)
        gateway.certificate_life_s = 2
        step(timedelta(minutes=-10))
        who = await identity.enrol(node_folder / "node", api_url=gateway.api_url, token="good", node_name="local")
        gateway.certificate_life_s = 3600
        journal = Journal(node_folder / "journal.db")
        agent = _build(who, journal)
        async with _running(agent):
            keeping = asyncio.create_task(renewal.keep(who, agent.link._clock, agent.link))
            async with asyncio.timeout(20):
                while len(gateway.serials) < 2:
                    await asyncio.sleep(0.05)
            keeping.cancel()
            await asyncio.wait({keeping})
        journal.close()

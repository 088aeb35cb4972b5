"""The agent and the sidecar lose one another, and both know everything again afterwards."""

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from integration.sidecar.stage import Stage
from penstock.kit.errors import Conflict
from penstock.node.packets import Packets
from penstock.node.sidecar import roster
from penstock.node.sidecarlink import SidecarLink
from penstock.wire.serverless import State
from penstock.wire.sidecar import AgentPacket, Ended, ExitClass, Has, Keep, Kill, Reaches, Serve
from penstock.wire.tasks import Serving, WorkerKeys

SERVING = Serving(
    worker="w",
    project_id="p",
    function="f",
    request="f",
    slots=1,
    socket="/tmp/serverless-framework/framework.sock",
    invoke_path="/invoke",
    health_path="/healthz",
    ready_s=1,
    framework=True,
)
KEYS = WorkerKeys(token="t", mac_key=b"k")


class ScriptedSidecar:
    """The other end of the agent's link."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heard: list[AgentPacket] = []
        self.folders: list[str] = []
        self.packets: Packets | None = None

    @asynccontextmanager
    async def run(self, has: list[str]) -> AsyncIterator[None]:
        listener = roster.bind(self.path)
        listener.setblocking(False)
        listener.listen()
        connection, _ = await asyncio.wait_for(asyncio.get_running_loop().sock_accept(listener), 20)
        self.packets = Packets(connection, on_packet=self._receive, on_lost=lambda: None)
        self.packets.send(Has(unit_ids=has))
        try:
            yield
        finally:
            self.packets.close()
            listener.close()

    def _receive(self, data: bytes, descriptor: int | None) -> None:
        self.heard.append(msgspec.msgpack.decode(data, type=AgentPacket))
        if descriptor is not None:
            self.folders.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
            os.close(descriptor)

    async def until(self, count: int) -> list[AgentPacket]:
        async with asyncio.timeout(20):
            while len(self.heard) < count:
                await asyncio.sleep(0.005)
        heard, self.heard = self.heard, []
        return heard


@asynccontextmanager
async def linked(path: Path, kills: list[tuple[str, str]]) -> AsyncIterator[SidecarLink]:
    link = SidecarLink(path, uid=None, on_kill=lambda unit_id, reason: kills.append((unit_id, reason)))
    running = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        link.close()


def serve(link: SidecarLink, unit_id: str, folder: Path) -> None:
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    link.serve(unit_id, uid=1, serving=SERVING, keys=KEYS, memory_bytes=1, folder=descriptor)


async def test_the_agent_says_everything_again_to_a_sidecar_that_comes_back() -> None:
    kills: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sidecar = ScriptedSidecar(folder / "s.sock")
        async with linked(sidecar.path, kills) as link:
            serve(link, "unt_1", folder)
            serve(link, "unt_2", folder)
            async with sidecar.run([]):
                first = await sidecar.until(3)
                assert [type(packet) for packet in first] == [Serve, Serve, Keep]
                assert sidecar.folders == [name, name]
                link.ended("unt_1", exit_class=ExitClass.OOM, detail="too much")
                link.ended("unt_unknown", exit_class=ExitClass.EXITED)
                [ended] = await sidecar.until(1)
                assert isinstance(ended, Ended)
                assert (ended.unit_id, ended.exit_class, ended.detail) == ("unt_1", ExitClass.OOM, "too much")
                assert sidecar.packets is not None
                sidecar.packets.send(Kill(unit_id="unt_2", reason="it hangs"))
                async with asyncio.timeout(20):
                    while not kills:
                        await asyncio.sleep(0.005)
                assert kills == [("unt_2", "it hangs")]
            async with sidecar.run([]):
                again = await sidecar.until(3)
                assert [type(packet) for packet in again] == [Serve, Ended, Keep]
                assert again[2] == Keep(unit_ids=["unt_2"])


async def test_functions_are_served_while_the_sidecar_is_there_and_reaches_the_queue() -> None:
    told: list[bool] = []
    with tempfile.TemporaryDirectory() as name:
        sidecar = ScriptedSidecar(Path(name) / "s.sock")
        link = SidecarLink(
            sidecar.path, uid=None, on_kill=lambda *_: None, on_reach=lambda: told.append(link.serves_functions)
        )
        running = asyncio.create_task(link.run())
        async with asyncio.timeout(20):
            async with sidecar.run([]):
                await sidecar.until(1)
                assert not link.serves_functions, "it did not say so yet"
                assert sidecar.packets is not None
                for reached in (True, False, True):
                    sidecar.packets.send(Reaches(queue=reached))
                while len(told) < 3:
                    await asyncio.sleep(0.005)
            while link.serves_functions:
                await asyncio.sleep(0.005)
        assert told == [True, False, True]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_an_agent_that_comes_back_is_told_again_whether_the_queue_is_reached(stage: Stage) -> None:
    stage.roster.reaches(True)
    await stage.heard.until(lambda: stage.link.serves_functions)
    packets = stage.link._packets
    assert packets is not None
    packets.close()
    await stage.heard.until(lambda: stage.link._packets not in (packets, None))
    await stage.heard.until(lambda: stage.link.serves_functions)


async def test_workers_go_on_while_the_agent_is_away_and_are_forgotten_when_it_knows_them_no_more(
    stage: Stage,
) -> None:
    kept, lost = await stage.ready(), await stage.ready()
    # The agent comes back, and knows one unit less.
    _, folder = stage.link._serves.pop(lost.id)
    os.close(folder)
    packets = stage.link._packets
    assert packets is not None
    packets.close()
    assert (await kept.invoke("inv-kept-on")).state is State.SUCCEEDED
    await stage.heard.until(lambda: lost.id not in stage.roster._workers)
    assert kept.id in stage.roster._workers
    await lost.dispatch("inv-forgotten")
    assert (await kept.invoke("inv-kept-again")).state is State.SUCCEEDED
    assert await lost.left() == 1
    assert len(kept.framework.invokes()) == 2


async def test_a_unit_with_new_keys_is_a_new_worker(stage: Stage) -> None:
    unit = await stage.ready()
    old = unit.mac_key
    packets = stage.link._packets
    assert packets is not None
    packets.close()
    unit.end(ExitClass.KILLED, "other keys")
    unit.mac_key = os.urandom(32)
    unit.serve()
    await stage.heard.until(lambda: stage.link.connected)
    await stage.heard.until(lambda: stage.roster._workers[unit.id][0].keys.mac_key == unit.mac_key)
    await unit.send(unit.message("inv-old-key"), key=old)
    assert (await unit.invoke("inv-new-key")).state is State.SUCCEEDED
    await unit.until_acknowledged()
    assert len(unit.framework.invokes()) == 1


async def test_a_stranger_at_the_socket_is_not_heard(stage: Stage) -> None:
    listener = stage.folder / "other.sock"
    bound = roster.bind(listener)
    served = roster.Roster(bound, frozenset({os.geteuid() + 1}), None)  # type: ignore[arg-type]
    running = asyncio.create_task(served.run())
    await asyncio.sleep(0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.setblocking(False)
        stranger.connect(str(listener))
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(stranger, 100), 20) == b""
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_second_sidecar_on_the_same_socket_is_refused(stage: Stage) -> None:
    with pytest.raises(Conflict):
        roster.bind(stage.folder / "sidecar.sock")

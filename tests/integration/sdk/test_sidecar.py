"""The framework by the sidecar's own client: both sides of the socket, nothing between."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.node.sidecar.errors import Unready
from penstock.node.sidecar.framework import Framework as Client
from penstock.node.sidecar.sockets import FrameworkSocket
from penstock.wire.serverless import SOCKET_FOLDER, Frame, FrameworkReply

from .framework import Framework, running

BYTES_MAX = 64 << 20


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Framework]:
    with running(tmp_path_factory.mktemp("kitchen"), "kitchen:Kitchen") as framework:
        framework.connect().__exit__()
        yield framework


@pytest.fixture
async def client(kitchen: Framework) -> AsyncIterator[Client]:
    made = Client(way(kitchen.path.parent))
    yield made
    made.close()


def way(folder: Path) -> FrameworkSocket:
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return FrameworkSocket(descriptor, f"{SOCKET_FOLDER}/framework.sock", uid=os.geteuid())


async def invoke(client: Client, method: str, *args: object) -> tuple[list[Frame], FrameworkReply]:
    heard: list[Frame] = []

    async def hear(frame: Frame) -> None:
        heard.append(frame)

    payload = {"args": args, "kwargs": {}, "method": method}
    request = {"invocationID": "inv-1", "mode": "stream", "payload": payload, "timeoutSeconds": 30, "attempt": 1}
    return heard, await client.invoke("/invoke", msgspec.json.encode(request), hear, bytes_max=BYTES_MAX)


async def test_it_is_well_and_answers(client: Client) -> None:
    await client.check_health("/healthz", 10)
    heard, reply = await invoke(client, "echo", {"a": [1, "ä"]})
    assert heard == []
    assert msgspec.json.decode(reply.body) == {"a": [1, "ä"]}
    assert (reply.statusCode, reply.contentType, reply.error) == (0, "application/json", "")


async def test_frames_are_heard_in_order(client: Client) -> None:
    heard, reply = await invoke(client, "talk", "ada")
    assert [frame.stdout or frame.stderr for frame in heard][:2] == ["hello ada", "to stderr"]
    assert msgspec.json.decode(reply.body) == "ada"
    heard, reply = await invoke(client, "count_slowly", 3)
    assert [msgspec.json.decode(frame.chunk) for frame in heard if frame.chunk is not None] == [0, 1, 2]


async def test_a_failure_and_a_large_answer(client: Client) -> None:
    _, reply = await invoke(client, "spoil", "milk")
    assert (reply.statusCode, reply.error, reply.errorType) == (500, "milk", "Spoilt")
    _, reply = await invoke(client, "echo", "x" * (8 << 20))
    assert len(msgspec.json.decode(reply.body)) == 8 << 20


async def test_a_broken_handler_is_not_well(tmp_path: Path) -> None:
    with running(tmp_path, "broken:run") as framework:
        framework.connect().__exit__()
        client = Client(way(tmp_path))
        with pytest.raises(Unready):
            await client.check_health("/healthz", 10)
        client.close()

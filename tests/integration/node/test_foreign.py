"""A socket that a unit may still hold works like any other, and whatever its other holder does, the loop goes on."""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator

import pytest

from penstock.node.foreign import open_streams


@pytest.fixture
async def ends() -> AsyncIterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection: our end and its peer's."""
    listener = socket.create_server(("127.0.0.1", 0))
    peer = socket.create_connection(listener.getsockname())
    ours, _ = listener.accept()
    listener.close()
    ours.setblocking(False)
    peer.settimeout(10)
    yield ours, peer
    ours.close()
    peer.close()


async def test_bytes_pass_both_ways_with_half_closes(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, peer = ends
    reader, writer = open_streams(ours, limit=1 << 16)
    body = os.urandom(3_000_000)
    read = asyncio.create_task(asyncio.to_thread(_read_all, peer))
    writer.write(body)
    await writer.drain()
    writer.write_eof()
    assert await read == body
    await asyncio.to_thread(peer.sendall, b"answer")
    peer.shutdown(socket.SHUT_WR)
    assert await reader.read() == b"answer"
    writer.close()
    await writer.wait_closed()
    assert ours.fileno() == -1


def _read_all(peer: socket.socket) -> bytes:
    found = b""
    while chunk := peer.recv(1 << 16):
        found += chunk
    return found


async def test_a_slow_reader_is_waited_for_without_limitless_memory(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = ends
    _, writer = open_streams(ours, limit=1 << 16)

    async def flood() -> None:
        while True:
            writer.write(bytes(1 << 16))
            await writer.drain()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(flood(), 0.3)
    assert writer.transport.get_write_buffer_size() < 1 << 18
    writer.transport.abort()


async def test_a_holder_that_makes_it_blocking_stops_nobody(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = ends
    copy = ours.dup()
    reader, writer = open_streams(ours, limit=1 << 16)
    stop = threading.Event()

    def meddle() -> None:
        while not stop.is_set():
            os.set_blocking(copy.fileno(), True)

    meddler = threading.Thread(target=meddle)
    meddler.start()
    try:
        ticks = 0
        async with asyncio.timeout(20):
            for _ in range(200):
                writer.write(bytes(1 << 16))
                await asyncio.sleep(0.001)
                ticks += 1
        assert ticks == 200
        assert writer.transport.get_write_buffer_size() > 0
    finally:
        stop.set()
        meddler.join()
        writer.transport.abort()
        copy.close()
    assert await reader.read() == b""


async def test_a_reset_is_told(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, peer = ends
    reader, writer = open_streams(ours, limit=1 << 16)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    peer.close()
    with pytest.raises(ConnectionResetError):
        await reader.read()
    assert writer.is_closing()

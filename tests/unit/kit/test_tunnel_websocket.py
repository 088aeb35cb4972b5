"""The WebSocket under a tunnel, over a transport in memory."""

import asyncio
import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kit.websocket import REFUSED, TunnelSocket, Violation

LIMIT = 1 << 20


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = False
        self.protocol: Any = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


class Kept:
    """A receiver that keeps messages."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.gone = False
        self.refuse = False

    def message(self, data: memoryview) -> None:
        if self.refuse:
            raise Violation(REFUSED, "not wanted")
        self.messages.append(bytes(data))

    def writable(self) -> None:
        pass

    def lost(self) -> None:
        self.gone = True


class End:
    """One end with its wire and its receiver."""

    def __init__(self, *, dialled: bool) -> None:
        self.wire = Wire()
        self.kept = Kept()
        self.socket = TunnelSocket(dialled=dialled, message_bytes_max=LIMIT)
        self.socket.adopt(self.wire)
        self.socket.receive(self.kept)

    def read(self, data: bytes, piece: int = 1 << 30) -> None:
        """The transport's way of handing bytes over."""
        while data:
            buffer = self.socket.get_buffer(-1)
            size = min(len(buffer), len(data), piece)
            assert size
            buffer[:size] = data[:size]
            self.socket.buffer_updated(size)
            data = data[size:]

    def taken(self) -> bytes:
        data = bytes(self.wire.written)
        self.wire.written.clear()
        return data

    def lose(self) -> None:
        self.socket.connection_lost(None)


def frame(opcode: int, payload: bytes, *, mask: bytes = b"\0\0\0\0", final: bool = True) -> bytes:
    """A client's frame."""
    size = len(payload)
    head = bytes((0x80 * final | opcode,))
    head += bytes((0x80 | size,)) if size < 126 else bytes((0x80 | 127,)) + size.to_bytes(8, "big")
    return head + mask + bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))


@pytest.fixture
async def server() -> Any:
    end = End(dialled=False)
    yield end
    end.lose()


SIZES = st.lists(st.sampled_from([0, 1, 125, 126, 65535, 65536, 300_000]), min_size=1, max_size=8)


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, piece=st.sampled_from([1000, 16384, 70_000, 1 << 20]), dialled=st.booleans())
def test_messages_arrive_whole_however_they_are_cut(sizes: list[int], piece: int, *, dialled: bool) -> None:
    async def run() -> None:
        sender, receiver = End(dialled=dialled), End(dialled=not dialled)
        messages = [os.urandom(size) for size in sizes]
        for message in messages:
            sender.socket.send([message[:10], message[10:]], len(message))
        receiver.read(sender.taken(), piece)
        assert receiver.kept.messages == messages
        for end in (sender, receiver):
            end.lose()

    asyncio.run(run())


async def test_masked_messages_of_other_clients_are_unmasked(server: End) -> None:
    for size in (0, 1, 3, 4, 5, 1001):
        server.read(frame(2, b"abcde" * size, mask=b"\x01\xff\x80\x7f"))
    assert server.kept.messages == [b"abcde" * size for size in (0, 1, 3, 4, 5, 1001)]


async def test_pings_are_answered_with_their_payload(server: End) -> None:
    server.read(frame(9, b"you there?"))
    assert server.taken() == b"\x8a\x0ayou there?"


async def test_close_is_answered_with_its_code(server: End) -> None:
    server.read(frame(8, (4409).to_bytes(2, "big") + b"superseded"))
    assert server.taken() == b"\x88\x02" + (4409).to_bytes(2, "big")
    assert server.wire.closed
    assert server.socket.close_code == 4409


async def test_own_close_waits_for_the_answer_and_keeps_its_code(server: End) -> None:
    server.socket.close(4401, "revoked")
    assert server.taken() == b"\x88\x09" + (4401).to_bytes(2, "big") + b"revoked"
    assert not server.wire.closed
    server.read(frame(2, b"too late"))
    server.read(frame(8, (1000).to_bytes(2, "big")))
    assert server.wire.closed
    assert server.kept.messages == []
    assert server.socket.close_code == 4401


BROKEN = {
    "unmasked": (b"\x82\x01x", 1002),
    "reserved bits": (frame(0x72, b"x"), 4400),
    "reserved opcode": (frame(3, b"x"), 4400),
    "text": (frame(1, b"x"), 4400),
    "fragment": (frame(2, b"x", final=False), 4400),
    "continuation": (frame(0, b"x"), 4400),
    "long ping": (frame(9, b"x" * 126), 4400),
    "too big": (b"\x82\xff" + (LIMIT + 1).to_bytes(8, "big"), 1009),
    "absurdly big": (b"\x82\xff" + b"\xff" * 8, 1009),
}


@pytest.mark.parametrize(("data", "code"), BROKEN.values(), ids=BROKEN.keys())
async def test_broken_frames_close_the_socket(server: End, data: bytes, code: int) -> None:
    server.read(data)
    assert server.taken()[2:4] == code.to_bytes(2, "big")
    assert server.kept.messages == []


async def test_receiver_that_refuses_closes_the_socket(server: End) -> None:
    server.kept.refuse = True
    server.read(frame(2, b"x"))
    assert server.socket.close_code == REFUSED


async def test_largest_message_needs_no_more_memory_than_itself(server: End) -> None:
    server.read(frame(2, bytes(LIMIT)), 16384)
    assert [len(message) for message in server.kept.messages] == [LIMIT]
    assert len(server.socket._buffer) <= LIMIT + 14


async def test_loss_is_told_once_and_closed_is_done(server: End) -> None:
    server.lose()
    assert server.kept.gone
    assert server.socket.closed.done()
    assert server.socket.close_code == 1006

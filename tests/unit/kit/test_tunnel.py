"""The mux, over two sockets in memory."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kit import tunnel
from penstock.kit.stream import PENDING_HIGH_BYTES, Stream, StreamAborted
from penstock.kit.streamio import splice
from penstock.kit.tunnel import Mux, TunnelFull
from penstock.kit.websocket import Receiver, Violation
from penstock.wire.link import Close
from penstock.wire.tunnel import (
    DATA_BYTES_MAX,
    FRAME_BYTES_MAX,
    STREAMS_MAX,
    WINDOW_BYTES,
    Abort,
    Credit,
    Data,
    End,
    Frame,
    Open,
    UnitPort,
)

TARGET = UnitPort(unit_id="alc_1", port=80)


class MemorySocket:
    """One end; what it sends waits for the other, which is full with four messages as a transport would be."""

    def __init__(self) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.peer: MemorySocket = self
        self.receiver: Receiver | None = None
        self.waiting: deque[bytes] = deque()
        self.close_code = 0
        self.messages = 0
        self.largest = 0

    @property
    def full(self) -> bool:
        return len(self.peer.waiting) >= 4

    def receive(self, receiver: Receiver) -> None:
        self.receiver = receiver

    def send(self, parts: Sequence[bytes | memoryview], size: int) -> None:
        message = b"".join(parts)
        assert len(message) == size
        self.messages += 1
        self.largest = max(self.largest, size)
        self.forge(message)

    def forge(self, message: bytes) -> None:
        self.peer.waiting.append(message)
        asyncio.get_running_loop().call_soon(self.peer.deliver)

    def deliver(self) -> None:
        if self.waiting and self.receiver is not None and not self.close_code:
            try:
                self.receiver.message(memoryview(self.waiting.popleft()))
            except Violation as error:
                self.close(error.code)
            if len(self.waiting) == 3 and self.peer.receiver is not None:
                self.peer.receiver.writable()

    def close(self, code: int = 1000, reason: str = "") -> None:
        for end in (self, self.peer):
            if not end.close_code:
                end.close_code = code
                if end.receiver is not None:
                    end.receiver.lost()
                end.closed.set_result(None)


@dataclass
class Pair:
    opener: Mux
    acceptor: Mux
    accepted: "asyncio.Queue[tuple[Stream, Open]]"
    opener_socket: MemorySocket
    acceptor_socket: MemorySocket

    async def stream(self) -> tuple[Stream, Stream]:
        near = self.opener.open(TARGET)
        far, _ = await self.accepted.get()
        return near, far

    async def forge(self, *frames: Frame) -> None:
        """As if the opener had sent these frames."""
        self.opener_socket.forge(msgspec.msgpack.encode(frames))


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    left, right = MemorySocket(), MemorySocket()
    left.peer, right.peer = right, left
    accepted: asyncio.Queue[tuple[Stream, Open]] = asyncio.Queue()
    made = Pair(
        Mux(left),
        Mux(right, accept=lambda stream, frame: accepted.put_nowait((stream, frame))),
        accepted,
        left,
        right,
    )
    tasks = [asyncio.create_task(made.opener.run()), asyncio.create_task(made.acceptor.run())]
    await asyncio.sleep(0)
    try:
        yield made
    finally:
        left.close()
        await asyncio.gather(*tasks)


async def settle(until: Callable[[], Any] = lambda: False, rounds: int = 200) -> None:
    """Let the loop run until nothing more can happen, or the condition holds."""
    for _ in range(rounds):
        if until():
            return
        await asyncio.sleep(0)


async def read_all(stream: Stream) -> dict[int, bytes]:
    channels: dict[int, bytearray] = {}
    while (item := await stream.read()) is not None:
        channels.setdefault(item[0], bytearray()).extend(item[1])
    return {channel: bytes(data) for channel, data in channels.items()}


class Recorder:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def data(self, channel: int, payload: bytes) -> None:
        self.events.append((channel, payload))

    def ended(self) -> None:
        self.events.append("ended")

    def aborted(self, error: StreamAborted) -> None:
        self.events.append(error.code)

    def blocked(self) -> None:
        self.events.append("blocked")

    def writable(self) -> None:
        self.events.append("writable")


async def test_bytes_arrive_in_order_on_their_channels() -> None:
    async with pair() as made:
        near, far = await made.stream()
        near.write(b"one", 1)
        near.write(b"two", 2)
        near.write(b"three", 1)
        near.end()
        assert await read_all(far) == {1: b"onethree", 2: b"two"}


async def test_open_carries_its_target_and_node() -> None:
    async with pair() as made:
        made.opener.open(TARGET, "nod_1")
        _, frame = await made.accepted.get()
        assert (frame.target, frame.node_id) == (TARGET, "nod_1")


async def test_writes_of_one_tick_leave_as_one_message() -> None:
    async with pair() as made:
        _, far = await made.stream()
        before = made.acceptor_socket.messages
        for _ in range(50):
            far.write(b"x")
        await settle()
        assert made.acceptor_socket.messages == before + 1


async def test_half_closed_stream_still_receives() -> None:
    async with pair() as made:
        near, far = await made.stream()
        near.end()
        assert await far.read() is None
        far.write(b"late answer")
        far.end()
        assert await read_all(near) == {0: b"late answer"}
        assert not made.opener.streams
        assert not made.acceptor.streams


async def test_writing_after_the_end_is_refused() -> None:
    async with pair() as made:
        near, _ = await made.stream()
        near.end()
        with pytest.raises(StreamAborted):
            near.write(b"x")


async def test_stalled_reader_stops_its_sender_and_bounds_memory() -> None:
    async with pair() as made:
        near, far = await made.stream()
        sent = 0

        async def flood() -> None:
            nonlocal sent
            while True:
                near.write(b"x" * 65536)
                sent += 65536
                await near.drain()

        task = asyncio.create_task(flood())
        await settle(rounds=1000)
        assert far.unread_bytes == WINDOW_BYTES
        assert made.acceptor.buffered_bytes == WINDOW_BYTES
        assert sent <= WINDOW_BYTES + PENDING_HIGH_BYTES + 65536
        task.cancel()


async def test_stalled_stream_does_not_stall_others() -> None:
    async with pair() as made:
        stalled, _ = await made.stream()
        stalled.write(b"x" * (2 * WINDOW_BYTES))
        await settle()
        near, far = await made.stream()
        near.write(b"y" * (3 * WINDOW_BYTES))
        near.end()
        assert len((await read_all(far))[0]) == 3 * WINDOW_BYTES


async def test_reading_returns_credit() -> None:
    async with pair() as made:
        near, far = await made.stream()
        near.write(b"x" * (4 * WINDOW_BYTES))
        near.end()
        assert len((await read_all(far))[0]) == 4 * WINDOW_BYTES
        assert made.acceptor.buffered_bytes == 0


async def test_messages_and_frames_stay_within_their_limits() -> None:
    async with pair() as made:
        streams = [await made.stream() for _ in range(20)]
        for near, _ in streams:
            near.write(b"x" * WINDOW_BYTES)
        sizes: list[int] = []
        for _, far in streams:
            item = await far.read()
            assert item is not None
            sizes.append(len(item[1]))
        assert max(sizes) <= DATA_BYTES_MAX
        assert made.opener_socket.largest <= FRAME_BYTES_MAX // 2


async def test_abort_reaches_the_other_side_with_its_code() -> None:
    async with pair() as made:
        near, far = await made.stream()
        far.abort("refused", "nothing listens on port 80")
        with pytest.raises(StreamAborted, match="nothing listens") as caught:
            await near.read()
        assert caught.value.code == "refused"
        with pytest.raises(StreamAborted):
            near.write(b"x")
        assert not made.opener.streams
        assert not made.acceptor.streams


async def test_abort_wakes_a_blocked_writer() -> None:
    async with pair() as made:
        near, far = await made.stream()
        near.write(b"x" * (3 * WINDOW_BYTES))
        drained = asyncio.create_task(near.drain())
        await settle()
        far.abort("cancelled")
        with pytest.raises(StreamAborted):
            await drained
        assert near.pending_bytes == 0


async def test_socket_loss_aborts_all_streams_as_lost() -> None:
    async with pair() as made:
        streams = [await made.stream() for _ in range(3)]
        made.opener_socket.close()
        for near, far in streams:
            for end in (near, far):
                with pytest.raises(StreamAborted) as caught:
                    await end.read()
                assert caught.value.code == "lost"
        with pytest.raises(StreamAborted):
            made.opener.open(TARGET)


async def test_sink_gets_data_then_the_end_once() -> None:
    async with pair() as made:
        near, far = await made.stream()
        near.write(b"early")
        near.end()
        await settle()
        sink = Recorder()
        far.attach(sink)
        far.pause()
        far.resume()
        assert sink.events == [(0, b"early"), "ended"]


async def test_paused_sink_gets_nothing_until_it_resumes() -> None:
    async with pair() as made:
        near, far = await made.stream()
        sink = Recorder()
        far.attach(sink)
        far.pause()
        near.write(b"a")
        near.end()
        await settle()
        assert sink.events == []
        far.resume()
        assert sink.events == [(0, b"a"), "ended"]


async def test_sink_is_told_to_stop_and_to_go_on_writing() -> None:
    async with pair() as made:
        near, far = await made.stream()
        sink = Recorder()
        near.attach(sink)
        near.write(b"x" * (2 * WINDOW_BYTES))
        assert sink.events == ["blocked"]
        near.end()
        await read_all(far)
        assert sink.events == ["blocked", "writable"]


async def test_sink_that_fails_ends_its_own_stream_only() -> None:
    class Broken(Recorder):
        def data(self, channel: int, payload: bytes) -> None:
            raise RuntimeError("a bug")

    async with pair() as made:
        bad_near, bad_far = await made.stream()
        near, far = await made.stream()
        bad_far.attach(Broken())
        bad_near.write(b"x")
        with pytest.raises(StreamAborted):
            await bad_near.read()
        near.write(b"fine")
        assert await far.read() == (0, b"fine")


async def test_spliced_streams_pass_bytes_ends_and_pressure() -> None:
    async with pair() as first, pair() as second:
        client, entry = await first.stream()
        onward, server = await second.stream()
        splice(entry, onward)
        client.write(b"question", 1)
        client.end()
        assert await read_all(server) == {1: b"question"}
        server.write(b"x" * (8 * WINDOW_BYTES))
        await settle(rounds=1000)
        held = client.unread_bytes + entry.pending_bytes + onward.unread_bytes
        assert held <= 2 * WINDOW_BYTES + PENDING_HIGH_BYTES + DATA_BYTES_MAX
        server.end()
        assert len((await read_all(client))[0]) == 8 * WINDOW_BYTES


async def test_abort_passes_a_splice_with_its_code() -> None:
    async with pair() as first, pair() as second:
        client, entry = await first.stream()
        onward, server = await second.stream()
        splice(entry, onward)
        server.abort("no_unit", "gone")
        with pytest.raises(StreamAborted, match="no_unit: gone"):
            await client.read()


async def test_streams_are_limited_in_number() -> None:
    async with pair() as made:
        for _ in range(STREAMS_MAX):
            made.opener.open(TARGET)
        with pytest.raises(TunnelFull):
            made.opener.open(TARGET)


async def test_acceptor_refuses_streams_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel.wire, "STREAMS_MAX", 1)
    async with pair() as made:
        await made.stream()
        made.opener._last_id = 2
        await made.forge(Open(2, TARGET))
        await settle()
        assert list(made.acceptor.streams) == [1]
        assert made.acceptor_socket.close_code == 0


async def test_too_much_unread_in_all_aborts_the_fullest_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "BUFFER_BYTES_MAX", 300_000)
    async with pair() as made:
        small_near, small_far = await made.stream()
        big_near, _ = await made.stream()
        small_near.write(b"s" * 50_000)
        big_near.write(b"b" * 600_000)
        with pytest.raises(StreamAborted) as caught:
            await big_near.read()
        assert caught.value.code == "exhausted"
        item = await small_far.read()
        assert item is not None
        assert made.acceptor.buffered_bytes < 300_000


VIOLATIONS: dict[str, list[Frame]] = {
    "stream that was never opened": [Data(9, 0, b"x")],
    "id used again": [Open(1, TARGET)],
    "id of zero": [Open(0, TARGET)],
    "id beyond 32 bits": [Open(1 << 40, TARGET)],
}


@pytest.mark.parametrize("frames", VIOLATIONS.values(), ids=VIOLATIONS.keys())
async def test_broken_framing_closes_the_socket_with_4400(frames: list[Frame]) -> None:
    async with pair() as made:
        near, _ = await made.stream()
        await made.forge(*frames)
        with pytest.raises(StreamAborted):
            await near.read()
        assert made.opener_socket.close_code == Close.MALFORMED


@pytest.mark.parametrize(
    "message",
    [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x91\x93\x63\x01\x02", b"\xdd\xff\xff\xff\xff", b"\xdd\0\0\0\0tail"],
)
async def test_garbage_closes_the_socket_with_4400(message: bytes) -> None:
    async with pair() as made:
        made.opener_socket.forge(message)
        await settle(lambda: made.acceptor_socket.close_code)
        assert made.acceptor_socket.close_code == Close.MALFORMED


async def test_frames_of_any_encoding_are_understood() -> None:
    async with pair() as made:
        _, far = await made.stream()
        await made.forge(Data(1, 0, b"short"), Data(1, 0, b"x" * 300), End(1))
        assert await read_all(far) == {0: b"short" + b"x" * 300}


async def test_opener_accepts_no_streams() -> None:
    async with pair() as made:
        made.acceptor_socket.forge(msgspec.msgpack.encode([Open(1, TARGET)]))
        await settle(lambda: made.opener_socket.close_code)
        assert made.opener_socket.close_code == Close.MALFORMED


STREAM_VIOLATIONS: dict[str, list[Frame]] = {
    "frame too large": [Data(1, 0, b"x" * (DATA_BYTES_MAX + 1))],
    "data beyond the window": [Data(1, 0, b"x" * DATA_BYTES_MAX)] * 9,
    "data after the end": [End(1), Data(1, 0, b"x")],
    "two ends": [End(1), End(1)],
    "credit for nothing": [Credit(1, 1)],
    "negative credit": [Credit(1, -5)],
}


@pytest.mark.parametrize("frames", STREAM_VIOLATIONS.values(), ids=STREAM_VIOLATIONS.keys())
async def test_broken_stream_is_aborted_and_others_live(frames: list[Frame]) -> None:
    async with pair() as made:
        near, _ = await made.stream()
        for frame in frames:
            await made.forge(frame)
        with pytest.raises(StreamAborted) as caught:
            await near.read()
        assert caught.value.code == "protocol"
        other, far = await made.stream()
        other.write(b"alive")
        assert await far.read() == (0, b"alive")


async def test_frames_for_a_stream_just_ended_are_ignored() -> None:
    async with pair() as made:
        near, far = await made.stream()
        near.abort("cancelled")
        await settle()
        await made.forge(Data(1, 0, b"late"), Credit(1, 5), End(1), Abort(1, "cancelled"))
        await settle()
        assert made.acceptor_socket.close_code == 0
        assert far.error is not None


Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write_far", "read", "read_far", "tick", "pause"]),
        st.integers(0, 2),
        st.sampled_from([1, 100, 70_000, 400_000]),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_any_interleaving_delivers_every_byte_in_order(steps: list[Step]) -> None:
    asyncio.run(_interleave(steps))


async def _interleave(steps: list[Step]) -> None:
    async with pair() as made:
        ends = [await made.stream() for _ in range(3)]
        sent: list[list[bytearray]] = [[bytearray(), bytearray()] for _ in ends]
        got: list[list[bytearray]] = [[bytearray(), bytearray()] for _ in ends]
        counter = 0

        async def read(index: int, side: int) -> None:
            stream = ends[index][1 - side]
            if stream.unread_bytes:
                item = await stream.read()
                assert item is not None
                got[index][side].extend(item[1])

        for action, index, size in steps:
            side = 1 if action.endswith("far") else 0
            if action.startswith("write"):
                counter += 1
                payload = counter.to_bytes(4, "big") * (size // 4 + 1)
                ends[index][side].write(payload)
                sent[index][side].extend(payload)
            elif action.startswith("read"):
                await read(index, side)
            else:
                await asyncio.sleep(0)
            assert all(stream.unread_bytes <= WINDOW_BYTES for both in ends for stream in both)
        for near, far in ends:
            near.end()
            far.end()
        for index, (near, far) in enumerate(ends):
            for side, stream in ((0, far), (1, near)):
                got[index][side].extend((await read_all(stream)).get(0, b""))
        assert got == sent
        assert not made.opener.streams
        assert made.opener.buffered_bytes == made.acceptor.buffered_bytes == 0

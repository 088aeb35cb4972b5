"""What a handler says goes in messages that the stream takes, however it is written."""

import msgspec
import pytest
from tests.unit.node.sidecar.test_results import told

from penstock.node.sidecar.output import Pace, Voice
from penstock.wire.serverless import INLINE_BYTES_MAX, WORKER_MESSAGE_BYTES_MAX, Frame, OutputKind, OutputMessage

#: Strings whose every character takes two bytes in a message.
ESCAPED = b'"' + b"\\\\" * (INLINE_BYTES_MAX // 2 - 1) + b'"'


async def _said(frames: list[Frame]) -> list[OutputMessage]:
    sent: list[bytes] = []

    async def publish(batch: bytes) -> None:
        sent.append(batch)

    voice = Voice(told().dispatch, publish, Pace(burst_bytes=16 << 20))
    for frame in frames:
        await voice.say(frame)
    await voice.flush()
    assert max(map(len, sent)) < WORKER_MESSAGE_BYTES_MAX - 1024
    return [msgspec.json.decode(each, type=OutputMessage) for each in sent]


async def test_the_largest_chunk_arrives_also_when_every_character_is_escaped() -> None:
    chunk = Frame(chunk=msgspec.Raw(ESCAPED))
    said = await _said([Frame(stdout="first"), chunk, chunk, Frame(stdout="last")])
    items = [item for message in said for item in message.items]
    assert [item.seq for item in items] == [0, 1, 2, 3]
    assert [item.kind for item in items] == [OutputKind.STDOUT, OutputKind.CHUNK, OutputKind.CHUNK, OutputKind.STDOUT]
    assert items[1].text == ESCAPED.decode()


@pytest.mark.parametrize("size", [60 << 10, 100 << 10, 300 << 10])
async def test_lines_of_control_characters_arrive(size: int) -> None:
    said = await _said([Frame(stdout="\x01" * size)] * 5)
    assert [len(item.text) for message in said for item in message.items] == [size] * 5


async def test_a_line_that_fits_no_message_is_cut_and_said_to_be() -> None:
    (message,) = await _said([Frame(stdout="\x01" * INLINE_BYTES_MAX)])
    assert [(item.kind, item.text[:18]) for item in message.items] == [(OutputKind.STDERR, "[output was cut: i")]

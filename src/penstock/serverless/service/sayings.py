"""What handlers say while they run: kept with their invocation, and those who follow it are woken."""

from collections.abc import Sequence

import msgspec
from nats.aio.msg import Msg

from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.serverless.service.results import discarded
from penstock.serverless.store import sayings
from penstock.serverless.store.sayings import Said
from penstock.wire import subjects
from penstock.wire.serverless import VERSION, OutputKind, OutputMessage

_decode = msgspec.json.Decoder(OutputMessage).decode


class Sayings:
    """Keeps what the consumer of outputs brings."""

    def __init__(self, db: Database, bus: Bus) -> None:
        self._db = db
        self._bus = bus

    async def take(self, messages: Sequence[Msg]) -> None:
        """Keep and acknowledge."""
        said = [each for message in messages for each in _read(message)]
        if said:
            async with self._db.read() as conn:
                heard = await sayings.add(conn, said)
            for invocation_id in heard:
                self._bus.hint(subjects.invocation(invocation_id))
        for message in messages:
            await message.ack()


def _read(message: Msg) -> list[Said]:
    try:
        read = _decode(message.data)
        token = bytes.fromhex(read.token)
    except (msgspec.DecodeError, ValueError):
        discarded.labels("output", "malformed_message").inc()
        return []
    if read.version != VERSION:
        discarded.labels("output", "unsupported_version").inc()
        return []
    if "\0" in read.projectID + read.invocationID or not 0 <= read.attempt < 1 << 31:
        discarded.labels("output", "malformed_message").inc()
        return []
    return [
        Said(
            project_id=read.projectID,
            invocation_id=read.invocationID,
            token=token,
            attempt=read.attempt,
            seq=item.seq,
            kind=item.kind,
            text=item.text.replace("\0", "�"),
        )
        for item in read.items
        if item.kind not in (OutputKind.PROGRESS, OutputKind.CHUNK) or _is_json(item.text)
    ]


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text.encode(errors="surrogatepass"))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True

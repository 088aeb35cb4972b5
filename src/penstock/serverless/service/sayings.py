"""What handlers say while they run: kept with their invocation, and those who follow it are woken."""

from collections.abc import Sequence

import msgspec
from nats.aio.msg import Msg

from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.serverless.model import FOREIGN
from penstock.serverless.service import burying
from penstock.serverless.service.burying import Foreign, Unreadable
from penstock.serverless.store import sayings
from penstock.serverless.store.sayings import Said
from penstock.wire import subjects
from penstock.wire.serverless import VERSION, FailureClass, OutputKind, OutputMessage
from penstock.wire.unreadable import UNREADABLE

_decode = msgspec.json.Decoder(OutputMessage).decode


class Sayings:
    """Keeps what the consumer of outputs brings."""

    def __init__(self, db: Database, bus: Bus) -> None:
        self._db = db
        self._bus = bus

    async def take(self, messages: Sequence[Msg]) -> None:
        """Keep and acknowledge; then bury what cannot be read."""
        said: list[Said] = []
        readable: list[Msg] = []
        refused: list[tuple[Msg, Unreadable | Foreign]] = []
        for message in messages:
            try:
                said += _read(message)
                readable.append(message)
            except (Unreadable, Foreign) as error:
                refused.append((message, error))
        if said:
            async with self._db.read() as conn:
                heard = await sayings.add(conn, said)
            for invocation_id in heard:
                self._bus.hint(subjects.invocation(invocation_id))
        for message in readable:
            await message.ack()
        for message, error in refused:
            await burying.refuse(self._bus, message, error)


def _read(message: Msg) -> list[Said]:
    try:
        read = _decode(message.data)
        token = bytes.fromhex(read.token)
    except (*UNREADABLE, ValueError) as error:
        raise Unreadable(FailureClass.MALFORMED_MESSAGE, str(error)) from error
    if read.version != VERSION:
        raise Unreadable(FailureClass.UNSUPPORTED_VERSION, f"version {read.version[:32]!r} is not understood")
    if "\0" in read.projectID + read.invocationID or not 0 <= read.attempt < 1 << 31:
        raise Unreadable(FailureClass.MALFORMED_MESSAGE, "a zero byte in a name, or an attempt out of range")
    if not _may_speak(message.subject, read.projectID):
        raise Foreign("foreign_output")
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


def _may_speak(subject: str, project_id: str) -> bool:
    """Whether a subject is of a function of this project. Which one, only the row of the invocation says."""
    request = subjects.last_token(subject)
    return request.startswith(f"{project_id}_") or (project_id == "prj_default" and not FOREIGN.fullmatch(request))


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text.encode(errors="surrogatepass"))
    except (*UNREADABLE, UnicodeError):
        return False
    return True

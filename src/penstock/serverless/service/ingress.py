"""Announcements from the queue: each points at a function that has something waiting. The rows say what."""

from collections.abc import Sequence

import msgspec
from nats.aio.msg import Msg

from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.serverless.service import burying
from penstock.serverless.service.burying import Foreign, Unreadable
from penstock.serverless.service.dispatching import Dispatcher
from penstock.serverless.service.telling import invocation_message
from penstock.serverless.store import claims, invocations
from penstock.wire import subjects
from penstock.wire.serverless import VERSION, FailureClass, InvocationMessage
from penstock.wire.unreadable import UNREADABLE

_decode = msgspec.json.Decoder(InvocationMessage).decode
_NAMES_MAX = 100_000
_UNPUBLISHED_S = 2.0
_UNPUBLISHED_MAX = 1000


class Ingress:
    """Takes what the consumer of announcements brings."""

    def __init__(self, db: Database, bus: Bus, dispatcher: Dispatcher) -> None:
        self._db = db
        self._bus = bus
        self._dispatcher = dispatcher
        self._names: dict[tuple[str, str], str] = {}

    def forget(self) -> None:
        """Functions changed."""
        self._names.clear()

    async def take(self, messages: Sequence[Msg]) -> None:
        """Point at their functions; they are acknowledged when those were looked at. Nothing is done with any of them
        before all are understood: what fails on the way comes again as it was."""
        readable: list[tuple[Msg, str | None]] = []
        buried: list[tuple[Msg, Unreadable | Foreign]] = []
        for message in messages:
            try:
                readable.append((message, await self._find(*_read(message))))
            except (Unreadable, Foreign) as error:
                buried.append((message, error))
        for message, error in buried:
            await burying.refuse(self._bus, message, error)
        for message, function_id in readable:
            # Only its acknowledgement is still needed, and that may take a while.
            message.data = b""
            if function_id is None:
                self._dispatcher.point([], [message])
            else:
                self._dispatcher.announced(function_id, message)

    async def _find(self, project_id: str, name: str) -> str | None:
        key = (project_id, name)
        if key not in self._names:
            async with self._db.read() as conn:
                found = await invocations.function(conn, project_id, name)
            if found is None:
                return None
            if len(self._names) >= _NAMES_MAX:
                self._names.clear()
            self._names[key] = found.id
        return self._names[key]

    async def publish_again(self) -> None:
        """Announce what was committed a while ago and still waits: its announcement may have been lost."""
        async with self._db.read() as conn:
            rows = await claims.unpublished(conn, older_than_s=_UNPUBLISHED_S, limit=_UNPUBLISHED_MAX)
        for row in rows:
            subject, message_id, body = invocation_message(row)
            await self._bus.client.publish(subject, body, headers={"Nats-Msg-Id": message_id})


class _Versioned(msgspec.Struct, frozen=True):
    version: str = VERSION


_versioned = msgspec.json.Decoder(_Versioned).decode


def _read(message: Msg) -> tuple[str, str]:
    """Project and function."""
    try:
        version = _versioned(message.data).version
        if version != VERSION:
            raise Unreadable(FailureClass.UNSUPPORTED_VERSION, f"version {version[:32]!r} is not understood")
        read = _decode(message.data)
    except UNREADABLE as error:
        raise Unreadable(FailureClass.MALFORMED_MESSAGE, str(error)) from error
    project_id, name = read.projectID or "prj_default", read.serverlessRequestID
    if message.subject != subjects.invoke(subjects.request_token(project_id, name)):
        raise Foreign("foreign_announcement")
    if "\0" in project_id + name:
        raise Unreadable(FailureClass.MALFORMED_MESSAGE, "a name has a zero byte")
    return project_id, name

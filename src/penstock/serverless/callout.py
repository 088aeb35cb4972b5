"""Who connects to NATS as a worker's sidecar, and what it may do there.

The server asks at every connection, one of the activators answers. A worker is known by its name and its token; it gets
an identity in the sidecars' account for a quarter of an hour, with exactly the subjects of its own work. The server
hangs up when that is over, and asks again: a worker that is gone stays out then. Until then it is harmless: its
consumer is deleted, its results carry no token that counts, its reports prove nothing. A refusal tells no reason.
"""

import re
import time
from typing import Any, Final

import msgspec
from nats.aio.msg import Msg

from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.kit.errors import Invalid
from penstock.kit.nkeys import Issuer, read
from penstock.kit.telemetry import logger
from penstock.serverless.service.workers import token_hash
from penstock.serverless.store import workers
from penstock.serverless.streams import WORK
from penstock.wire import subjects

LIFE_S: Final = 15 * 60
#: What a sidecar subscribes to: inboxes for pulls, acknowledgements and requests, orders, answers.
_SUBSCRIPTIONS_MAX: Final = 16
_REFUSED: Final = "refused"
_NAME: Final = re.compile(r"[a-z0-9_-]{1,128}")

_log = logger(__name__)


class _Options(msgspec.Struct, frozen=True):
    user: str = ""
    password: str = msgspec.field(default="", name="pass")


class _Server(msgspec.Struct, frozen=True):
    id: str


class Asked(msgspec.Struct, frozen=True):
    """What the server says of a connection: `user_nkey` is how it will know the identity, if there is one."""

    server_id: _Server
    user_nkey: str
    connect_opts: _Options


class Callout:
    """Answers the server; any number may."""

    def __init__(self, database: Database, bus: Bus, issuer_seed: str, *, account: str = "SIDECARS") -> None:
        self._database = database
        self._bus = bus
        self._issuer = Issuer(issuer_seed)
        self._account = account

    async def serve(self) -> None:
        """From now on, also after reconnects; returns when the subscription stands."""
        await self._bus.client.subscribe(
            subjects.AUTH_CALLOUT, queue="callout", cb=self._receive, pending_msgs_limit=4096
        )
        await self._bus.client.flush()

    async def _receive(self, message: Msg) -> None:
        try:
            asked = question(message.data)
            await message.respond(self._answer(asked, await self._identity(asked)).encode())
        except Exception as error:  # noqa: BLE001 (the subscription outlives one bad question; the server refuses by itself)
            _log.warning("callout_failed", error=repr(error))

    async def _identity(self, asked: Asked) -> str | None:
        """A token for the connection, or none."""
        worker, token = asked.connect_opts.user, asked.connect_opts.password
        request = await self._request(worker, token)
        if request is None:
            _log.info("worker_refused", worker=worker[:128])
            return None
        now = int(time.time())
        rights = permissions(request, worker)
        return self._issuer.sign(
            {
                "aud": self._account,
                "sub": asked.user_nkey,
                "name": worker,
                "iat": now,
                "exp": now + LIFE_S,
                "nats": rights,
            }
        )

    async def _request(self, worker: str, token: str) -> str | None:
        if not _NAME.fullmatch(worker):
            return None
        async with self._database.read() as conn:
            return await workers.identify(conn, worker, token_hash(token))

    def _answer(self, asked: Asked, identity: str | None) -> str:
        said: dict[str, Any] = {"type": "authorization_response", "version": 2}
        said |= {"error": _REFUSED} if identity is None else {"jwt": identity}
        return self._issuer.sign(
            {"aud": asked.server_id.id, "sub": asked.user_nkey, "iat": int(time.time()), "nats": said}
        )


def question(token: bytes) -> Asked:
    """What the server asks, out of a token that it signed."""
    claims = read(token)
    try:
        return msgspec.convert(claims.get("nats"), Asked)
    except msgspec.ValidationError as error:
        raise Invalid("this is no question of a NATS server") from error


def permissions(request: str, worker: str) -> dict[str, Any]:
    """All that one worker's sidecar may do. Its inboxes are its own: with `_INBOX.>` it would hear everybody's."""
    publish = [
        subjects.next_messages(WORK, worker),
        subjects.acks(WORK, worker),
        subjects.result(request),
        subjects.metrics(request),
        subjects.output(request),
        subjects.call(request, worker),
        subjects.dead_letter("dispatch", request),
    ]
    subscribe = [
        f"{subjects.worker_inbox(worker)}.>",
        subjects.control(request, worker),
        subjects.call_answer(request, worker),
    ]
    return {
        "type": "user",
        "version": 2,
        "pub": {"allow": publish},
        "sub": {"allow": subscribe},
        "subs": _SUBSCRIPTIONS_MAX,
        "payload": -1,
        "data": -1,
        "allowed_connection_types": ["STANDARD", "WEBSOCKET"],
    }

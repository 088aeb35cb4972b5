"""Tells receivers how invocations ended: claim (short transaction), send (none), settle (by the claim's number).

Whoever dies in between has sent it or not; the lease ends and another sends it again. So each end is told at least
once within a day of trying, or the row says why not. What is sent is signed with the project's key.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Final

import msgspec
from prometheus_client import Counter

from penstock.kit.caller import Caller
from penstock.kit.clock import backoff_s
from penstock.kit.db import Database, Reader
from penstock.kit.outward import Outward, Undelivered
from penstock.kit.telemetry import logger
from penstock.serverless.ports import Vault
from penstock.serverless.service.invocations import Shown
from penstock.serverless.store import callbacks, reads
from penstock.serverless.store.callbacks import Due, SigningKey
from penstock.wire import rest, signature

AT_ONCE: Final = 32
PER_PROJECT: Final = 4
#: Longer than any exchange.
LEASE_S: Final = 30.0
GIVE_UP_S: Final = 24 * 3600.0
RETRY_FIRST_S: Final = 5.0
RETRY_MAX_S: Final = 3600.0
_ERROR_CHARS_MAX: Final = 300
_USER_AGENT: Final = "Penstock-Callbacks/1"
_PREFIX: Final = "fsk_"
_NAME: Final = "callbacks key"

_log = logger(__name__)
_sent = Counter("penstock_callback_attempts_total", "Callbacks of invocations, by what became of them.", ("outcome",))


class Signing:
    """The projects' keys, made when they are first asked for."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault

    async def show(self, conn: Reader, caller: Caller) -> rest.SigningKey:
        """The key, for those who write functions: receivers verify signatures with it."""
        caller.require("functions.write")
        key = await self._key(conn, caller.project_id)
        return rest.SigningKey(secret=self._open(caller.project_id, key), created_at=key.created_at)

    async def secret(self, conn: Reader, project_id: str) -> str:
        """What the project's callbacks are signed with."""
        return self._open(project_id, await self._key(conn, project_id))

    async def _key(self, conn: Reader, project_id: str) -> SigningKey:
        found = await callbacks.signing_key(conn, project_id)
        if found is None:
            value = _PREFIX + secrets.token_urlsafe(32)
            key_id, sealed = self._vault.seal(project_id=project_id, name=_NAME, value=value.encode())
            await callbacks.add_signing_key(conn, project_id, key_id, sealed)
            found = await callbacks.signing_key(conn, project_id)
        assert found is not None
        return found

    def _open(self, project_id: str, key: SigningKey) -> str:
        return self._vault.unseal(project_id=project_id, name=_NAME, key_id=key.key_id, sealed=key.sealed).decode()


def sealed_again(vault: Vault, project_id: str, key_id: str, sealed: bytes) -> tuple[str, str, bytes]:
    """The same key under the current master key."""
    value = vault.unseal(project_id=project_id, name=_NAME, key_id=key_id, sealed=sealed)
    return project_id, *vault.seal(project_id=project_id, name=_NAME, value=value)


class Callbacks:
    """The callbacks that this process has under way. Any number of processes may send."""

    def __init__(self, db: Database, outward: Outward, vault: Vault, show: Callable[[Shown], rest.Invocation]) -> None:
        self._db = db
        self._outward = outward
        self._signing = Signing(vault)
        self._show = show
        self._sending: set[asyncio.Task[None]] = set()

    async def send(self) -> int:
        """Start what is due and there is room for; how many. A slow receiver holds up nobody else."""
        room = AT_ONCE - len(self._sending)
        if room <= 0:
            return 0
        async with self._db.read() as conn:
            if not await callbacks.any_due(conn):
                return 0
        async with self._db.transaction() as tx:
            claimed = await callbacks.claim(tx, room=room, per_project=PER_PROJECT, lease_s=LEASE_S)
        for due in claimed:
            task = asyncio.create_task(self._supervise(due), name=f"callback-{due.id}")
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        return len(claimed)

    async def settle(self) -> None:
        """Wait for what is under way."""
        await asyncio.gather(*self._sending)

    async def close(self) -> None:
        """Drop what is under way; it is sent again when its lease has ended."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    async def _supervise(self, due: Due) -> None:
        try:
            await self._deliver(due)
        except Exception:  # noqa: BLE001 - supervises one callback: the others go on, and its lease ends
            _log.exception("callback_broken", callback_id=due.id)

    async def _deliver(self, due: Due) -> None:
        message = await self._message(due)
        if message is None:
            await self._failed(due, "the invocation is not kept any more", give_up_s=0.0)
            return
        try:
            await self._outward.post(due.url, *message)
        except Undelivered as error:
            _sent.labels(error.failure).inc()
            _log.info("callback_failed", callback_id=due.id, failure=error.failure, attempts=due.attempts)
            await self._failed(due, f"{error.failure}: {error.why}", give_up_s=GIVE_UP_S)
        else:
            _sent.labels("delivered").inc()
            async with self._db.read() as conn:
                await callbacks.delivered(conn, due)

    async def _failed(self, due: Due, error: str, *, give_up_s: float) -> None:
        again_s = backoff_s(due.attempts, base_s=RETRY_FIRST_S, cap_s=RETRY_MAX_S)
        async with self._db.read() as conn:
            await callbacks.failed(conn, due, error[:_ERROR_CHARS_MAX], again_s=again_s, give_up_s=give_up_s)

    async def _message(self, due: Due) -> tuple[bytes, dict[str, str]] | None:
        async with self._db.read() as conn:
            found = await reads.find(conn, due.project_id, due.invocation_id)
            secret = await self._signing.secret(conn, due.project_id)
        if found is None:
            return None
        body = msgspec.json.encode(self._show(Shown(row=found, waiting_for="")))
        return body, {
            "Content-Type": "application/json",
            "User-Agent": _USER_AGENT,
            signature.EVENT_ID_HEADER: due.id,
            signature.HEADER: signature.sign(body, [secret], at=int(time.time())),
        }

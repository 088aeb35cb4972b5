"""One effect per `Idempotency-Key`.

The key's row is written in the transaction of the effect, so either both exist or neither does. A racer waits a short
while for the first call to finish and then gets its exact answer; the same key with another body is refused.
"""

import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

import asyncpg

from penstock.kit.db import Database, Tx
from penstock.kit.errors import Conflict, Invalid

_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")
_WAIT: Final = "2s"
#: The columns are computed in this order: a limit for the wait, the wait, the limit of before.
_LOCK: Final = """
    with before as materialized (select current_setting('lock_timeout') as lock_timeout)
    select set_config('lock_timeout', $2, true), pg_advisory_xact_lock(hashtextextended($1, 7)),
        set_config('lock_timeout', before.lock_timeout, true) from before
"""


class KeyReused(Conflict):
    """The key came before with another request."""

    code = "idempotency_key_reused"


class InProgress(Conflict):
    """The first call with this key has not finished."""

    code = "in_progress"


@dataclass(frozen=True, slots=True)
class Once:
    """The key of one request, bound to its caller and its body."""

    scope: str
    key: str
    digest: bytes

    @classmethod
    def of(cls, *, scope: str, key: str, operation: str, body: bytes) -> "Once":
        """Check the key; `operation` keeps equal bodies of different routes apart."""
        if not _KEY.fullmatch(key):
            raise Invalid("Idempotency-Key must be 1 to 255 printable ASCII characters", field="Idempotency-Key")
        return cls(scope, key, hashlib.sha256(operation.encode() + b"\0" + body).digest())

    def sealed(self, credential: str) -> "Once":
        """The same for a body that must not be guessed from the digest: only the caller's credential, which is stored
        nowhere, can compute it again. The key then works with that credential only."""
        key = hashlib.sha256(b"penstock digest\0" + credential.encode()).digest()
        return replace(self, digest=hmac.digest(key, self.digest, "sha256"))


async def run(db: Database, once: Once | None, effect: Callable[[Tx], Awaitable[bytes]]) -> bytes:
    """The effect's answer, encoded: computed now, or kept from the first call with this key."""
    if once is None:
        async with db.transaction() as tx:
            return await effect(tx)
    async with db.transaction() as tx:
        await _lock(tx, once)
        if (kept := await _find(tx, once)) is not None:
            return kept
        response = await effect(tx)
        await tx.execute(
            "insert into kit.idempotency (scope, key, digest, response) values ($1, $2, $3, $4)",
            once.scope,
            once.key,
            once.digest,
            response,
        )
        return response


async def _lock(tx: Tx, once: Once) -> None:
    try:
        await tx.execute(_LOCK, f"{once.scope} {once.key}", _WAIT)
    except asyncpg.LockNotAvailableError as error:
        raise InProgress("the first call with this Idempotency-Key is still running", retry_after_s=1) from error


async def _find(tx: Tx, once: Once) -> bytes | None:
    row = await tx.fetchrow(
        "select digest, response from kit.idempotency where scope = $1 and key = $2", once.scope, once.key
    )
    if row is None:
        return None
    if row["digest"] != once.digest:
        raise KeyReused("this Idempotency-Key was used with another request", field="Idempotency-Key")
    return row["response"]

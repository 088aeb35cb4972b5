"""The keys of workers: what a sidecar proves itself with, and what it knows dispatches by."""

import hashlib
import secrets

from penstock.kit.db import Tx
from penstock.kit.errors import NotFound
from penstock.serverless.store import workers
from penstock.wire.tasks import WorkerKeys


async def new_keys(tx: Tx, allocation_id: str) -> WorkerKeys:
    """Fresh ones for the worker of this allocation; those that were given before end."""
    keys = WorkerKeys(token=secrets.token_urlsafe(32), mac_key=secrets.token_bytes(32))
    if not await workers.rekey(tx, allocation_id, token_hash=token_hash(keys.token), mac_key=keys.mac_key):
        raise NotFound("the worker has ended", allocation_id=allocation_id)
    return keys


def token_hash(token: str) -> bytes:
    """What is kept of a token."""
    return hashlib.sha256(token.encode()).digest()

"""Whether units could be made from a request at all: capacity, quota and funds aside, which change by the minute."""

from penstock.compute.ports import Secrets
from penstock.compute.service import catalogue, runtimes, validate
from penstock.compute.store import catalogue as skus
from penstock.kit.caller import Caller
from penstock.kit.db import Tx
from penstock.wire.rest import AllocationCreate


async def template(tx: Tx, caller: Caller, body: AllocationCreate, secrets: Secrets) -> None:
    """Pass, or the first reason to refuse it."""
    validate.request(body)
    await catalogue.opened(tx, await skus.sku(tx, body.sku), name=body.sku, gpus=body.gpus)
    if body.secrets:
        await secrets.refer(tx, project_id=caller.project_id, uses=body.secrets)
    await runtimes.choose(tx, caller, body)

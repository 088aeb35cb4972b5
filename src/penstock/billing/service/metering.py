"""Takes in what other domains metered: the facts `billing.usage_recorded`, each key once.

They are read from the log in Postgres, in order and without a gap, so nothing depends on NATS. A fact that cannot be
rated is kept as refused, with the reason, and holds nothing else up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from penstock.billing import metrics
from penstock.billing.model import AMOUNT_MAX_MICROUSD, Price, Use, rated
from penstock.billing.store import metering
from penstock.kit import outbox
from penstock.kit.db import Database, Tx
from penstock.kit.outbox import Past
from penstock.kit.telemetry import logger
from penstock.kit.text import dollars
from penstock.wire.catalogue import UsageFact

_log = logger(__name__)
FACT: Final = "billing.usage_recorded"
BATCH: Final = 2000


@dataclass(frozen=True, slots=True)
class Metering:
    """Reads on where the last reader stopped."""

    db: Database

    async def sweep(self) -> None:
        """Everything that was committed so far."""
        while await self._batch() == BATCH:
            pass

    async def _batch(self) -> int:
        async with self.db.transaction() as tx:
            position = await metering.lock_position(tx)
            if position is None:
                return 0
            facts, onwards = await outbox.read(tx, FACT, position, BATCH)
            if facts:
                await self._take_in(tx, facts)
            await metering.advance(tx, onwards)
            return len(facts)

    async def _take_in(self, tx: Tx, facts: Sequence[Past]) -> None:
        read = [_use(fact) for fact in facts]
        prices = await metering.prices(tx, sorted({use.meter for use, _ in read}))
        judged = [(use, *_price(use, wrong, prices)) for use, wrong in read]
        await metering.open_series(tx, {_series_id(use, price): (use, price) for use, price, _ in judged if price})
        for use, price, refusal in judged:
            series_id = _series_id(use, price) if price else None
            new = await metering.record(tx, use, series_id=series_id, refusal=refusal)
            outcome = "refused" if refusal else "taken" if new else "repeated"
            metrics.RECORDED.labels(outcome).inc()
            if refusal:
                _log.warning("usage_refused", key=use.key, project_id=use.project_id, reason=refusal)


def _use(fact: Past) -> tuple[Use, str]:
    """What the fact says, and what is wrong with it, if anything."""
    try:
        said = msgspec.convert(fact.payload, UsageFact)
    except msgspec.ValidationError as error:
        return _unreadable(fact), f"the fact cannot be read: {error}"
    if fact.organisation_id is None or fact.project_id is None:
        return _unreadable(fact), "the fact names no organisation or no project"
    fields: dict[str, Any] = msgspec.structs.asdict(said)
    return Use(organisation_id=fact.organisation_id, project_id=fact.project_id, **fields), ""


def _unreadable(fact: Past) -> Use:
    return Use(
        key=fact.event_id,
        organisation_id=fact.organisation_id or "",
        project_id=fact.project_id or "",
        meter="",
        quantity=0,
        resource_kind="",
        resource_id="",
        occurred_at=fact.occurred_at,
    )


def _price(use: Use, wrong: str, prices: Mapping[str, Sequence[Price]]) -> tuple[Price | None, str]:
    """The price at the time of the use. What no sum of 64 bits could hold is no use but an error: one such row would
    stop the meter for everybody."""
    if wrong:
        return None, wrong
    in_force = (price for price in prices.get(use.meter, ()) if price.effective_at <= use.occurred_at)
    price = next(in_force, None)
    if price is None:
        return None, f"meter {use.meter} had no price then"
    cost = rated(use.quantity, price_microusd=price.price_microusd, per=price.per)
    if cost > AMOUNT_MAX_MICROUSD:
        return None, f"it would cost {dollars(cost)}: more than {dollars(AMOUNT_MAX_MICROUSD)} at once"
    return price, ""


def _series_id(use: Use, price: Price) -> str:
    parts = (use.project_id, use.resource_kind, use.resource_id, use.meter, str(price.version), use.key_id or "")
    return "/".join(parts) + ("/leased" if use.leased else "")

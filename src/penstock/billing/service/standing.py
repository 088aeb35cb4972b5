"""Watches balances: each fall is told once, and what cannot be paid for any more has to go.

Looking changes nothing, so any number of billers look as often as they like; the move itself is made under the
customer's lock, from what is true then.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.billing import metrics
from penstock.billing.model import (
    RECOVERED_FACT,
    SEVERITY,
    WARNINGS,
    Standing,
    State,
    Terms,
    judge,
    path,
    standing_payload,
)
from penstock.billing.service import releases
from penstock.billing.store import standing as store
from penstock.kit import audit, outbox
from penstock.kit.db import Database, Reader, Tx
from penstock.kit.ids import new_id
from penstock.kit.outbox import Event
from penstock.kit.telemetry import correlated, logger

_log = logger(__name__)
_ACTOR: Final = audit.system("biller")
BATCH: Final = 1000
DEPLETED: Final = "the organisation's balance is used up: top up and create it again"

Look = Callable[..., Awaitable[Sequence[Standing]]]


async def find(conn: Reader, organisation_id: str) -> Standing | None:
    """How an organisation stands; none when it never had or owed anything."""
    return await store.find(conn, organisation_id)


@dataclass(frozen=True, slots=True)
class Standings:
    """Keeps the states of all balances true."""

    db: Database
    terms: Terms

    async def sweep(self) -> None:
        """Look at everybody."""
        await self._sweep(store.everyone)
        async with self.db.read() as conn:
            counted = await store.counts(conn)
        for state in State:
            metrics.CUSTOMERS.labels(state).set(counted.get(state, 0))

    async def sweep_burning(self) -> None:
        """Look at those whose balance shrinks by the second."""
        await self._sweep(store.burning)

    async def _sweep(self, look: Look) -> None:
        after = ""
        while True:
            async with self.db.read() as conn:
                found = await look(conn, after=after, limit=BATCH)
            for standing in found:
                if judge(standing, self.terms) is not standing.state or _runs_on_nothing(standing):
                    await self.reconsider(standing.organisation_id)
            if len(found) < BATCH:
                return
            after = found[-1].organisation_id

    async def reconsider(self, organisation_id: str) -> None:
        """Bring one organisation's state in line with its balance."""
        with correlated(new_id("cor")):
            async with self.db.transaction() as tx:
                standing = await store.lock(tx, organisation_id)
                if standing is not None:
                    await self._move(tx, standing)

    async def _move(self, tx: Tx, standing: Standing) -> None:
        target = judge(standing, self.terms)
        for state in path(standing.state, target):
            version = await store.enter(tx, standing, state)
            fell = SEVERITY[state] > SEVERITY[standing.state]
            await outbox.append(tx, _fact(standing, state, version, WARNINGS[state] if fell else RECOVERED_FACT))
            _log.info("balance_state", organisation_id=standing.organisation_id, state=state)
        fell = target is State.DEPLETED and standing.state is not State.DEPLETED
        if fell or (target is State.DEPLETED and _runs_on_nothing(standing)):
            await self._ask_for_release(tx, standing)

    async def _ask_for_release(self, tx: Tx, standing: Standing) -> None:
        organisation_id = standing.organisation_id
        if await releases.is_asked(tx, organisation_id):
            return
        asked = await releases.request(
            tx,
            organisation_id=organisation_id,
            reason=DEPLETED,
            aggregate_id=_aggregate(organisation_id),
            version=await store.enter(tx, standing, State.DEPLETED),
        )
        await outbox.append(tx, asked)
        await audit.record(tx, _ACTOR, "billing.force_release", organisation_id, organisation_id=organisation_id)


def _runs_on_nothing(standing: Standing) -> bool:
    """Something runs although the balance was used up before: whoever let it start looked at another time."""
    return standing.state is State.DEPLETED and standing.burn_microusd_per_hour > 0


def _fact(standing: Standing, state: State, version: int, fact: str) -> Event:
    return Event(
        type=fact,
        aggregate_id=_aggregate(standing.organisation_id),
        version=version,
        organisation_id=standing.organisation_id,
        project_id=None,
        payload=standing_payload(standing, state),
    )


def _aggregate(organisation_id: str) -> str:
    return f"{organisation_id}/balance"

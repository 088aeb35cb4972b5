"""What compute asks of other domains inside its own transactions; filled in `processes/`. None of them commits."""

from collections.abc import Sequence
from typing import Protocol

from penstock.compute.model import Allocation
from penstock.kit.db import Reader, Tx
from penstock.wire.rest import SecretUse
from penstock.wire.tasks import SecretRef


class Funds(Protocol):
    """Billing's answer to whether an organisation can pay."""

    async def check(
        self, tx: Tx, *, organisation_id: str, project_id: str, key_id: str | None, price_microusd_per_hour: int
    ) -> None:
        """Pass, or raise what is missing. May lock the account: it is asked before any other lock is taken."""
        ...


class Slots(Protocol):
    """Fleet's slots, by their health."""

    async def block(self, tx: Tx, slot_ids: Sequence[str], reason: str) -> None:
        """Take slots that were not proved clean out of service."""
        ...

    async def unblock(self, tx: Tx, slot_ids: Sequence[str]) -> None:
        """They were proved clean after all; those that are not blocked stay as they are."""
        ...


class Secrets(Protocol):
    """The project's secrets."""

    async def refer(self, tx: Tx, *, project_id: str, uses: Sequence[SecretUse]) -> Sequence[SecretRef]:
        """The current version of each, in the same order; Invalid for one that is not there."""
        ...


class Handoffs(Protocol):
    """The fleet's way to give a stock unit to its tenant."""

    async def dispatch(self, tx: Tx, allocation: Allocation) -> str:
        """Ask the node for it, once, and return the task's id."""
        ...


class Users(Protocol):
    """What another domain makes allocations for."""

    async def of_sku(self, conn: Reader, sku: str, *, limit: int) -> Sequence[str]:
        """What needs this offer, in words such as `function hello in project prj_…`."""
        ...

    async def of_runtime(self, conn: Reader, project_id: str, runtime: str, *, limit: int) -> Sequence[str]:
        """The same of what names this runtime of the project and may still start with it."""
        ...


class Projects(Protocol):
    """Identity's projects."""

    async def exists(self, conn: Reader, project_id: str) -> bool:
        """Whether there is such a project."""
        ...

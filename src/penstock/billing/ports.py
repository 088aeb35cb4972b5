"""What billing asks of other domains inside its own transactions; filled in `processes/`. None of them commits."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock.kit.db import Reader, Tx


class Allocations(Protocol):
    """Compute's allocations, which billing reads from the views `compute.billable` and `compute.commitments`."""

    async def settle(self, tx: Tx, allocation_ids: Sequence[str]) -> None:
        """They are charged to their end, and leave the meter."""
        ...


class Organisations(Protocol):
    """Identity's organisations and projects."""

    async def organisation_name(self, conn: Reader, organisation_id: str) -> str | None:
        """What it is called; none when there is no such organisation."""
        ...

    async def project_names(self, conn: Reader, project_ids: Sequence[str]) -> Mapping[str, str]:
        """What they are called, archived ones included."""
        ...


class Keys(Protocol):
    """Identity's API keys."""

    async def key_exists(self, conn: Reader, project_id: str, key_id: str) -> bool:
        """Whether the project has such a key, and it is not revoked."""
        ...

"""What functions are to their owners: definitions, versions, workers, schedules. Pure.

A version is what was given, for ever; its digest says whether a deployment changes anything.
"""

import hashlib
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import msgspec

from penstock.wire.rest import FunctionPut

FUNCTIONS_MAX: Final = 1000
#: So many versions of a function can be rolled back to; older ones go.
VERSIONS_KEPT: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """A function with what it does now. `queued` is counted up to a bound."""

    id: str
    project_id: str
    organisation_id: str
    name: str
    current_version: int
    serving_version: int
    row_version: int
    definition: FunctionPut
    workers_ready: int
    workers_starting: int
    slots_free: int
    queued: int
    running: int
    wait_reason: str
    created_at: datetime
    updated_at: datetime

    @property
    def waiting_for(self) -> str:
        """Why workers are missing, where some are: for what waits, for the least number, for a version to take over."""
        missing = self.queued > 0 and not self.slots_free
        due = missing or self.serving_version != self.current_version
        return self.wait_reason if due or self.workers_ready < self.definition.workers_min else ""

    @property
    def fact(self) -> dict[str, str | int]:
        """What its events say."""
        return {
            "function_id": self.id,
            "name": self.name,
            "current_version": self.current_version,
            "serving_version": self.serving_version,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A version as it was given."""

    number: int
    definition: FunctionPut
    created_at: datetime
    created_by: str
    current: bool
    serving: bool


def digest(definition: FunctionPut) -> bytes:
    """Equal for definitions that say the same."""
    return hashlib.sha256(msgspec.json.encode(definition, order="deterministic")).digest()

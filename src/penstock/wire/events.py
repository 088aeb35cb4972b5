"""The envelope of every fact on `evt.>`."""

import msgspec

from penstock.wire.times import Time


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """A fact. `version` is the aggregate's; consumers use it to tell order, gaps and repeats."""

    event_id: str
    event_type: str
    aggregate_id: str
    version: int
    organisation_id: str | None
    project_id: str | None
    correlation_id: str
    occurred_at: Time
    payload: msgspec.Raw

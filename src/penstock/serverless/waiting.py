"""Why an invocation does not run yet, in words for its sender. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from penstock.serverless.model import Invocation


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a function's workers could take at `now`. `reason` says why no worker could be made lately."""

    now: datetime
    reason: str
    ready: int
    starting: int
    slots: int
    free: int


def waiting_for(it: Invocation, standings: Mapping[str, Standing], *, ahead: int | None = None) -> str:
    """Empty when nothing is waited for. `ahead` is how many of the same function come before it."""
    standing = standings.get(it.function_id or "")
    if not it.waiting or standing is None:
        return ""
    if it.due_at > standing.now:
        moment = it.due_at.isoformat(timespec="seconds")
        return f"its next attempt, at {moment}" if it.attempt else f"its time, {moment}"
    return _worker(standing) + ("" if not ahead else f"; {ahead} before it")


def _worker(standing: Standing) -> str:
    reason = f": {standing.reason}" if standing.reason else ""
    if not standing.ready:
        return (f"a worker that starts ({standing.starting})" if standing.starting else "a worker") + reason
    if standing.free <= 0:
        more = f"; {standing.starting} more start" if standing.starting else reason
        return f"a free slot: all {standing.slots} of {standing.ready} workers are busy{more}"
    return "its turn"

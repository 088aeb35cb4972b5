"""Time as processes see it: for display, back-off and local timeouts only. Database time decides everything durable."""

from datetime import UTC, datetime
from random import uniform


def utc_now() -> datetime:
    """The wall clock of this process, aware."""
    return datetime.now(UTC)


def backoff_s(attempt: int, *, base_s: float = 0.1, cap_s: float = 10.0) -> float:
    """Exponential back-off with full jitter; `attempt` counts from zero."""
    return uniform(base_s / 2, min(cap_s, base_s * 2.0 ** min(attempt, 20)))

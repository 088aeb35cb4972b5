"""What compute measures; names as in the source."""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

QUEUE_DEPTH: Final = Gauge("provisioning_queue_depth", "Requests that are not active yet")
DISPATCH_S: Final = Histogram(
    "provisioning_dispatch_latency_seconds",
    "From the request to the start of its provisioning",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30, 120),
)
TIMEOUTS: Final = Counter("provisioning_timeouts_total", "Allocations that ran into a deadline", ["state"])
FAILURES: Final = Counter("provisioning_failures_total", "Allocations that failed, by where", ["at"])
ALLOCATIONS: Final = Gauge("penstock_allocations", "Allocations by state", ["state"])

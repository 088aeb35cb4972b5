"""What the fleet measures."""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

LINKS: Final = Gauge("penstock_links", "Node links that this gateway holds")
LINKS_REFUSED: Final = Counter("penstock_links_refused_total", "Node links closed by us, by close code", ["code"])
TASKS: Final = Gauge("penstock_tasks", "Node tasks that are not finished", ["state"])
RESULTS: Final = Counter("penstock_task_results_total", "Results that nodes sent, by what became of them", ["verdict"])
DISPATCH_S: Final = Histogram(
    "penstock_task_dispatch_seconds",
    "From a task's transaction to its leaving for the node",
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 30, 300),
)
SKEW_S: Final = Gauge(
    "penstock_node_clock_skew_seconds", "How far a node's clock is ahead of the database's", ["node_id"]
)
OVER_CAPACITY: Final = Counter(
    "penstock_node_capacity_alarms_total", "Inventories with more GPUs than the node was approved for"
)
NODES: Final = Gauge("penstock_nodes", "Nodes by state", ["state"])
GPUS_QUARANTINED: Final = Gauge("penstock_gpus_quarantined", "GPUs out of service until proved to work", ["cause"])

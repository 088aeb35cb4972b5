"""Closed sets of words in answers, as enums in the contract.

Values stay `str`, so that a client of today reads a word that a server of tomorrow adds. Each set equals the enum of
the domain that owns it; a test compares them.
"""

from typing import Annotated

from msgspec import Meta


def _one_of(*words: str) -> Meta:
    return Meta(extra_json_schema={"enum": list(words)})


AllocationState = Annotated[
    str, _one_of("requested", "provisioning", "active", "releasing", "released", "failed", "release_failed")
]
AllocationPurpose = Annotated[
    str, _one_of("interactive", "function_worker", "actor_runner", "engine", "cluster_member", "stock")
]
NodeState = Annotated[
    str, _one_of("pending", "enrolled", "ready", "cordoned", "draining", "unreachable", "lost", "retired")
]
SlotHealth = Annotated[str, _one_of("healthy", "degraded", "quarantined", "cleanup_blocked", "missing")]
TaskState = Annotated[str, _one_of("queued", "leased", "succeeded", "failed", "refused", "expired")]
InvocationState = Annotated[
    str,
    _one_of("queued", "dispatching", "running", "succeeded", "failed", "expired", "cancelled", "dead_lettered"),
]
InvocationMode = Annotated[str, _one_of("sync", "async", "stream")]
WorkerState = Annotated[str, _one_of("starting", "ready", "draining", "gone")]
BalanceState = Annotated[str, _one_of("healthy", "low_balance", "auto_release_pending", "depleted")]
PaymentState = Annotated[str, _one_of("open", "succeeded", "failed", "expired")]
RefundState = Annotated[str, _one_of("requested", "pending", "succeeded", "failed")]
ProviderEventState = Annotated[
    str, _one_of("received", "waiting", "applied", "ignored", "unmatched", "rejected", "held", "discarded")
]
WebhookState = Annotated[str, _one_of("active", "paused", "deleted")]
DeliveryState = Annotated[str, _one_of("pending", "delivered", "failed")]
BudgetPeriod = Annotated[str, _one_of("hourly", "daily", "monthly")]
BudgetAction = Annotated[str, _one_of("reject", "warn")]
ProjectRole = Annotated[str, _one_of("owner", "admin", "developer", "viewer", "billing")]
PrincipalKind = Annotated[str, _one_of("user", "service_account")]

"""Every type of event and what its payload holds. `docs/api/asyncapi.json` is made from this table.

A payload may gain fields; it never loses one.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from penstock.wire.times import Time


class OrganisationFact(msgspec.Struct, frozen=True, kw_only=True):
    """About an organisation."""

    organisation_id: str
    name: str


class UserFact(msgspec.Struct, frozen=True, kw_only=True):
    """About a person."""

    user_id: str
    display_name: str


class ProjectFact(msgspec.Struct, frozen=True, kw_only=True):
    """About a project."""

    project_id: str
    name: str


class MemberFact(msgspec.Struct, frozen=True, kw_only=True):
    """About a principal's place in a project; no role means that it left."""

    project_id: str
    principal_id: str
    role: str | None


class KeyFact(msgspec.Struct, frozen=True, kw_only=True):
    """About an API key."""

    key_id: str
    name: str
    role: str
    principal_id: str


class NodeFact(msgspec.Struct, frozen=True, kw_only=True):
    """About a node, after its move."""

    node_id: str
    name: str
    state: str
    reason: str


class NodeCapacityFact(msgspec.Struct, frozen=True, kw_only=True):
    """A node reports more GPUs than were approved."""

    node_id: str
    name: str
    reported: int
    approved: int


class SlotFact(msgspec.Struct, frozen=True, kw_only=True):
    """About a slot's health."""

    node_id: str
    gpu_uuid: str
    health: str
    health_detail: str


class GpuFact(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU was taken out of service, or was proved to work and is back. `cause`: failed, operator."""

    node_id: str
    gpu_uuid: str
    cause: str
    detail: str


class AllocationFact(msgspec.Struct, frozen=True, kw_only=True):
    """About an allocation, after its move."""

    allocation_id: str
    purpose: str
    sku: str
    gpus: int
    node_id: str | None
    price_microusd_per_hour: int
    state: str
    reason: str


class BalanceFact(msgspec.Struct, frozen=True, kw_only=True):
    """How an organisation stands, after the change. `lasts_s` is how long the balance lasts at this rate, none for
    ever."""

    organisation_id: str
    state: str
    available_microusd: int
    burn_microusd_per_hour: int
    lasts_s: float | None


class ForceReleaseFact(msgspec.Struct, frozen=True, kw_only=True):
    """An organisation, one of its projects or one of their keys has to give back what runs."""

    organisation_id: str
    project_id: str | None
    key_id: str | None
    reason: str


class UsageFact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something was used that has a price. Any domain writes this fact in the transaction that commits the use, under
    the aggregate `use/<project>/<key>`, version 1. The same key counts once in a project. `leased` is true
    where a budget's lease covers it."""

    key: Annotated[str, Meta(min_length=1, max_length=200)]
    meter: Annotated[str, Meta(min_length=1, max_length=63)]
    quantity: Annotated[int, Meta(ge=0, le=10**15)]
    resource_kind: Annotated[str, Meta(pattern="^[a-z][a-z0-9_]{0,62}$")]
    resource_id: Annotated[str, Meta(min_length=1, max_length=200)]
    occurred_at: Time
    key_id: Annotated[str, Meta(pattern="^[A-Za-z0-9_]{1,64}$")] | None = None
    labels: Annotated[dict[str, str], Meta(max_length=64)] = {}
    leased: bool = False


class PaymentFact(msgspec.Struct, frozen=True, kw_only=True):
    """About a payment. `amount_microusd` is what changed the balance."""

    payment_id: str
    organisation_id: str
    amount_microusd: int
    currency: str
    state: str


class BudgetFact(msgspec.Struct, frozen=True, kw_only=True):
    """A budget's period has reached four fifths of its limit (warning), or all of it (exhausted)."""

    budget_id: str
    project_id: str
    key_id: str | None
    period: str
    period_start: Time
    limit_microusd: int
    spent_microusd: int
    action: str


class WebhookFact(msgspec.Struct, frozen=True, kw_only=True):
    """About a webhook, after its move. `reason` says why it was paused."""

    webhook_id: str
    url: str
    state: str
    reason: str


class WebhookTestFact(msgspec.Struct, frozen=True, kw_only=True):
    """Sent to one webhook when somebody asks for it, to see whether it arrives; in no feed."""

    webhook_id: str


class FunctionFact(msgspec.Struct, frozen=True, kw_only=True):
    """About a function, after the change. `serving_version` gets the calls until the current one has a worker."""

    function_id: str
    name: str
    current_version: int
    serving_version: int


CATALOGUE: Final[dict[str, type[msgspec.Struct]]] = {
    "identity.organisation_created": OrganisationFact,
    "identity.user_created": UserFact,
    "identity.project_created": ProjectFact,
    "identity.project_updated": ProjectFact,
    "identity.project_deleted": ProjectFact,
    "identity.member_changed": MemberFact,
    "identity.member_removed": MemberFact,
    "identity.service_account_created": MemberFact,
    "identity.service_account_deleted": MemberFact,
    "identity.key_created": KeyFact,
    "identity.key_revoked": KeyFact,
    "fleet.node_registered": NodeFact,
    "fleet.node_enrolled": NodeFact,
    "fleet.node_recovered": NodeFact,
    "fleet.node_ready": NodeFact,
    "fleet.node_cordoned": NodeFact,
    "fleet.node_uncordoned": NodeFact,
    "fleet.node_draining": NodeFact,
    "fleet.node_unreachable": NodeFact,
    "fleet.node_lost": NodeFact,
    "fleet.node_revoked": NodeFact,
    "fleet.node_retired": NodeFact,
    "fleet.node_capacity_exceeded": NodeCapacityFact,
    "fleet.gpu_quarantined": GpuFact,
    "fleet.gpu_returned": GpuFact,
    "fleet.slot_healthy": SlotFact,
    "fleet.slot_degraded": SlotFact,
    "fleet.slot_quarantined": SlotFact,
    "fleet.slot_cleanup_blocked": SlotFact,
    "fleet.slot_missing": SlotFact,
    "provisioning.requested": AllocationFact,
    "provisioning.started": AllocationFact,
    "provisioning.updated": AllocationFact,
    "provisioning.active": AllocationFact,
    "provisioning.failed": AllocationFact,
    "provisioning.releasing.requested": AllocationFact,
    "provisioning.releasing.completed": AllocationFact,
    "provisioning.release_failed": AllocationFact,
    "notices.webhook_created": WebhookFact,
    "notices.webhook_updated": WebhookFact,
    "notices.webhook_paused": WebhookFact,
    "notices.webhook_resumed": WebhookFact,
    "notices.webhook_deleted": WebhookFact,
    "notices.test": WebhookTestFact,
    "provisioning.force_release_requested": ForceReleaseFact,
    "billing.usage_recorded": UsageFact,
    "billing.low_balance_warning": BalanceFact,
    "billing.auto_release_pending": BalanceFact,
    "billing.balance_depleted": BalanceFact,
    "billing.balance_recovered": BalanceFact,
    "billing.budget_warning": BudgetFact,
    "billing.budget_exhausted": BudgetFact,
    "serverless.function_deployed": FunctionFact,
    "serverless.function_rolled_back": FunctionFact,
    "serverless.function_deleted": FunctionFact,
    "payments.balance_credited": PaymentFact,
    "payments.failed": PaymentFact,
    "payments.refunded": PaymentFact,
    "payments.refund_failed": PaymentFact,
    "payments.disputed": PaymentFact,
    "payments.dispute_closed": PaymentFact,
}

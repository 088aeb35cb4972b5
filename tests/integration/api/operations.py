"""The routes of the contract as the walks over all of them need them: sample bodies, ids, who may what."""

import re
from dataclasses import dataclass
from typing import Any

SKU = {
    "description": "one",
    "gpu_model": "*",
    "gpu_counts": [1, 2],
    "price_microusd_per_gpu_hour": 1_000_000,
    "memory_bytes_per_gpu": 1 << 30,
    "cpus_per_gpu": 1,
}
UNKNOWN = "0" * 26
CANARY = "canary-9e1f"
#: What a viewer may do. Everything else is refused with 403.
VIEWER_MAY = {
    "getAllocation",
    "getBudget",
    "getEgress",
    "getFunction",
    "getGpuUnit",
    "getInvocation",
    "getInvocationResult",
    "getObject",
    "getPrice",
    "getProject",
    "getQuota",
    "getResolution",
    "getRuntime",
    "getSecret",
    "getSku",
    "getUsage",
    "getWebhook",
    "listAllocations",
    "listBudgets",
    "listEvents",
    "listFunctionDeadLetters",
    "listFunctionLogs",
    "listFunctionVersions",
    "listFunctionWorkers",
    "listFunctions",
    "listGpuUnits",
    "listInvocations",
    "listMembers",
    "listObjects",
    "listOrganisations",
    "listPrices",
    "listProjects",
    "listRuntimes",
    "listSecrets",
    "listSessions",
    "listSkus",
    "listWebhookDeliveries",
    "listWebhooks",
    "streamEvents",
    "streamInvocation",
    "whoami",
}
BODIES: dict[str, Any] = {
    "createAllocation": {"sku": "g1.1"},
    "createGpuUnit": {
        "operationID": "o",
        "name": "canary-unit",
        "specName": "g1.1",
        "serverless": {"enabled": True, "requestID": "canary-unit"},
    },
    "updateGpuUnit": {
        "operationID": "u",
        "name": CANARY,
        "specName": "g1.1",
        "serverless": {"enabled": True, "requestID": "canary-unit"},
    },
    "createInvocation": {"serverlessRequestID": "canary-unit"},
    "mapFunction": {"payloads": [1]},
    "putFunction": {"sku": "g1.1"},
    "rollbackFunction": {},
    "createGroupMapping": {"group": "g", "role": "viewer", "project_id": f"prj_{UNKNOWN}"},
    "createSession": {"token": "a.b.c"},
    "putBudget": {"period": "daily", "limit_microusd": 5, "action": "warn"},
    "putIdentityProvider": {"issuer": "https://id.example", "client_id": "c"},
    "createCorrection": {"transfer_id": "usage/x", "amount_microusd": 1, "memo": "m"},
    "createEnrolmentToken": {"node_name": "stranger"},
    "createGrant": {"organisation_id": f"org_{UNKNOWN}", "amount_microusd": 1, "memo": "m"},
    "createKey": {"name": "k", "role": "viewer"},
    "createOrganisation": {"name": "o"},
    "createProject": {"name": "p"},
    "createServiceAccount": {"name": "s", "role": "viewer"},
    "createWebhook": {"url": "https://8.8.8.8/hook"},
    "createUser": {"issuer": "i", "subject": "s", "display_name": "d"},
    "putBillingTerms": {"credit_limit_microusd": 1},
    "putEgress": {"rules": ["pypi.org"]},
    "putMember": {"role": "viewer"},
    "putObject": {"any": "bytes"},
    "putPrice": {"price_microusd": 1, "per": 1},
    "createResolution": {"requirements": "a"},
    "putQuota": {"gpus_max": 1},
    "createTopup": {"amount_microusd": 1_000_000},
    "createRefund": {"payment_id": f"pay_{UNKNOWN}", "amount_microusd": 10_000, "reason": "r"},
    "acceptProviderEvent": {"reason": "r"},
    "discardProviderEvent": {"reason": "r"},
    "putRuntime": {"lock": "a==1 --hash=sha256:" + "0" * 64},
    "putSecret": {"value": "v"},
    "putSku": SKU,
    "updateSku": {"description": "one"},
    "putStock": {"floor": 1},
    "releaseAllocation": {},
    "updateAllocation": {"name": "n"},
    "updateProject": {"name": "n"},
    "updateWebhook": {"enabled": True},
    "forceSlotCleanup": {"runtime_verified_absent": True},
    "quarantineGpu": {"reason": "r"},
    **{order: {} for order in ("cordonNode", "uncordonNode", "drainNode", "revokeNode", "retireNode")},
}
PREFIXES = {
    "project_id": "prj",
    "key_id": "key",
    "account_id": "sva",
    "principal_id": "usr",
    "allocation_id": "alc",
    "node_id": "nod",
    "slot_id": "slt",
    "event_id": "evt",
    "session_id": "ses",
    "budget_id": "bdg",
    "mapping_id": "map",
    "user_id": "usr",
    "organisation_id": "org",
    "payment_id": "pay",
    "refund_id": "rfd",
    "webhook_id": "whk",
    "delivery_id": "dlv",
    "letter_id": "dlt",
    "resolution_id": "rsl",
}


@dataclass(frozen=True)
class Operation:
    """One route."""

    id: str
    method: str
    path: str
    public: bool
    has_body: bool

    @property
    def parameters(self) -> list[str]:
        """The ids in its path."""
        return re.findall(r"{(\w+)}", self.path)

    def at(self, ids: dict[str, str]) -> str:
        """Its path below /api/v1 with these ids; what is not among them is unknown to everyone."""
        given = {name: ids.get(name, f"{PREFIXES.get(name, 'xxx')}_{UNKNOWN}") for name in self.parameters}
        return self.path.removeprefix("/api/v1").format(**given)

"""Every command that is one request: what it asks for, and an answer to it."""

from typing import Any

from .answers import MOMENT, WHOAMI, allocation, page

ALC, NOD, PRJ, USR, SVA, KEYID, EVT, SLT = (
    f"{prefix}_{'0' * 26}" for prefix in ("alc", "nod", "prj", "usr", "sva", "key", "evt", "slt")
)
PROJECT = {"id": PRJ, "organisation_id": "org_default", "name": "research", "created_at": MOMENT}
QUOTA = {"project_id": PRJ, "gpus_max": 8, "gpus_used": 3}
MEMBER = {
    "principal_id": USR,
    "principal_kind": "user",
    "display_name": "Ada",
    "role": "viewer",
    "created_at": MOMENT,
}
ACCOUNT = {"id": SVA, "project_id": PRJ, "name": "ci", "role": "developer", "created_at": MOMENT}
USER = {"id": USR, "issuer": "https://id", "subject": "4711", "display_name": "Ada", "created_at": MOMENT}
ORGANISATION = {"id": "org_default", "name": "acme", "created_at": MOMENT}
KEY_ROW = {
    "id": KEYID,
    "name": "ci",
    "hint": "psk_abcd",
    "role": "developer",
    "principal_id": USR,
    "project_id": PRJ,
    "created_at": MOMENT,
    "expires_at": None,
    "revoked_at": None,
    "last_used_at": None,
}
GPU = {
    "slot_id": SLT,
    "uuid": "GPU-1",
    "index": 0,
    "model": "H100",
    "memory_bytes": 80 << 30,
    "simulated": True,
    "health": "healthy",
    "health_detail": "",
    "allocation_id": None,
}
NODE = {
    "id": NOD,
    "name": "rack1",
    "state": "ready",
    "state_reason": "",
    "simulated": True,
    "agent_version": "0.1.0",
    "gpus_total": 1,
    "gpus_free": 1,
    "labels": {},
    "last_heartbeat_at": MOMENT,
    "certificate_expires_at": None,
    "created_at": MOMENT,
    "gpus": [GPU],
}
TOKEN = {
    "token": "ent_x",
    "node_id": NOD,
    "node_name": "rack1",
    "kind": "enrol",
    "expires_at": MOMENT,
    "command": "penstock node join --token ent_x",
}
TASK = {
    "id": "tsk_1",
    "node_id": NOD,
    "type": "unit.start",
    "allocation_id": None,
    "state": "done",
    "fence": 1,
    "attempts": 1,
    "error_code": "",
    "detail": "",
    "created_at": MOMENT,
    "finished_at": None,
}
SKU = {
    "name": "g1.1",
    "description": "one",
    "gpu_model": "H100",
    "gpu_counts": [1, 8],
    "price_microusd_per_gpu_hour": 3_490_000,
    "memory_bytes_per_gpu": 64 << 30,
    "cpus_per_gpu": 16.0,
    "processes_max": 4096,
    "scratch_bytes": 10 << 30,
    "enabled": True,
    "gpus_free": 5,
}
EVENT = {
    "cursor": "c1",
    "event_id": EVT,
    "event_type": "provisioning.active",
    "aggregate_id": ALC,
    "version": 3,
    "project_id": PRJ,
    "correlation_id": "cor",
    "occurred_at": MOMENT,
    "payload": {"n": 1},
}
AUDIT = {
    "id": "aud_1",
    "at": MOMENT,
    "actor_id": USR,
    "actor_kind": "user",
    "action": "allocations.create",
    "target_id": ALC,
    "organisation_id": "org_1",
    "project_id": PRJ,
    "correlation_id": "cor",
    "detail": {},
}
EVIDENCE = {"correlation_id": "cor", "audit": [AUDIT], "events": [], "tasks": [], "sagas": [], "missing": []}
LETTER = {
    "event_id": EVT,
    "event_type": "a.b",
    "aggregate_id": ALC,
    "version": 1,
    "occurred_at": MOMENT,
    "attempts": 9,
    "last_error": "refused",
}
ACTIVE = allocation("active", ALC)

#: Command line, method, path, answer, and (where one is sent) the body.
CASES: list[tuple[str, str, str, Any, Any]] = [
    ("whoami", "GET", "/whoami", WHOAMI, None),
    ("key list", "GET", "/keys", page([KEY_ROW]), None),
    (
        "key create ci --role viewer --expires-in 600",
        "POST",
        "/keys",
        {"key": KEY_ROW, "secret": "psk_secret"},
        {"name": "ci", "role": "viewer", "service_account_id": None, "expires_in_s": 600},
    ),
    (f"key revoke {KEYID}", "DELETE", f"/keys/{KEYID}", None, None),
    ("project list", "GET", "/projects", page([PROJECT]), None),
    ("project create research", "POST", "/projects", PROJECT, {"name": "research", "organisation_id": None}),
    (f"project show {PRJ}", "GET", f"/projects/{PRJ}", PROJECT, None),
    (f"project rename {PRJ} lab", "PATCH", f"/projects/{PRJ}", PROJECT, {"name": "lab"}),
    (f"project delete {PRJ}", "DELETE", f"/projects/{PRJ}", None, None),
    (f"project quota {PRJ}", "GET", f"/projects/{PRJ}/quota", QUOTA, None),
    (f"project quota {PRJ} --gpus-max 8", "PUT", f"/projects/{PRJ}/quota", QUOTA, {"gpus_max": 8}),
    (f"project members {PRJ}", "GET", f"/projects/{PRJ}/members", page([MEMBER]), None),
    (f"member list {PRJ}", "GET", f"/projects/{PRJ}/members", page([MEMBER]), None),
    (f"member set {PRJ} {USR} --role viewer", "PUT", f"/projects/{PRJ}/members/{USR}", MEMBER, {"role": "viewer"}),
    (f"member remove {PRJ} {SVA}", "DELETE", f"/projects/{PRJ}/members/{SVA}", None, None),
    ("service-account list", "GET", "/service-accounts", page([ACCOUNT]), None),
    (
        "service-account create ci --role viewer",
        "POST",
        "/service-accounts",
        ACCOUNT,
        {"name": "ci", "role": "viewer"},
    ),
    (f"service-account delete {SVA}", "DELETE", f"/service-accounts/{SVA}", None, None),
    ("user list", "GET", "/users", page([USER]), None),
    (
        "user create Ada --issuer https://id --subject 4711",
        "POST",
        "/users",
        USER,
        {"issuer": "https://id", "subject": "4711", "display_name": "Ada"},
    ),
    ("org list", "GET", "/organisations", page([ORGANISATION]), None),
    ("org create acme", "POST", "/organisations", ORGANISATION, {"name": "acme"}),
    (
        "node enroll rack1 --gpus 8",
        "POST",
        "/nodes/enrolment-tokens",
        TOKEN,
        {"node_name": "rack1", "gpus_approved": 8},
    ),
    (f"node recover {NOD}", "POST", f"/nodes/{NOD}/recovery-tokens", TOKEN, None),
    ("node list --state ready", "GET", "/nodes", page([NODE]), None),
    (f"node show {NOD}", "GET", f"/nodes/{NOD}", NODE, None),
    (f"node tasks {NOD}", "GET", f"/nodes/{NOD}/tasks", page([TASK]), None),
    *(
        (f"node {verb} {NOD} --reason why", "POST", f"/nodes/{NOD}/{verb}", NODE, {"reason": "why"})
        for verb in ("cordon", "uncordon", "drain", "revoke", "retire")
    ),
    (
        f"node force-cleanup {NOD} {SLT} --verified",
        "POST",
        f"/nodes/{NOD}/slots/{SLT}/force-cleanup",
        GPU,
        {"runtime_verified_absent": True, "reason": ""},
    ),
    ("sku list", "GET", "/skus", page([SKU]), None),
    ("sku show g1.1", "GET", "/skus/g1.1", SKU, None),
    (
        "sku set g1.1 --gpu-model H100 --price 3.49 --memory 64 --cpus 16 --count 1 --count 8 --disabled",
        "PUT",
        "/skus/g1.1",
        SKU,
        {
            "description": "",
            "gpu_model": "H100",
            "gpu_counts": [1, 8],
            "price_microusd_per_gpu_hour": 3_490_000,
            "memory_bytes_per_gpu": 64 << 30,
            "cpus_per_gpu": 16.0,
            "processes_max": 4096,
            "scratch_bytes": 10 << 30,
            "enabled": False,
        },
    ),
    (
        "alloc create --sku g1.1 --gpus 2 --name n --label a=1 --env A=b=c --image i --port 80 --wait-capacity 5",
        "POST",
        "/allocations",
        ACTIVE,
        {
            "sku": "g1.1",
            "gpus": 2,
            "name": "n",
            "image": "i",
            "labels": {"a": "1"},
            "env": {"A": "b=c"},
            "command": [],
            "ports": [80],
            "wait_s": 5,
            "secrets": [],
            "runtime": None,
        },
    ),
    ("alloc list --state active --sku g1.1", "GET", "/allocations", page([ACTIVE]), None),
    (f"alloc show {ALC}", "GET", f"/allocations/{ALC}", ACTIVE, None),
    (f"alloc update {ALC} --label a=2", "PATCH", f"/allocations/{ALC}", ACTIVE, {"name": None, "labels": {"a": "2"}}),
    (f"alloc release {ALC} --reason done", "POST", f"/allocations/{ALC}/release", ACTIVE, {"reason": "done"}),
    ("events --type a.b", "GET", "/events", page([EVENT]), None),
    ("audit list --action allocations.create", "GET", "/audit", page([AUDIT]), None),
    ("dead-letters list", "GET", "/dead-letters", page([LETTER]), None),
    (f"dead-letters requeue {EVT}", "POST", f"/dead-letters/{EVT}/requeue", None, None),
    (f"dead-letters discard {EVT}", "DELETE", f"/dead-letters/{EVT}", None, None),
]

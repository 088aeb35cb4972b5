"""SKUs, quotas and allocations."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.wire.rest.common import Body, Labels, Name, Slug
from penstock.wire.rest.states import AllocationPurpose, AllocationState
from penstock.wire.times import Time


class SkuPut(Body, frozen=True):
    """Define or change an offer; operators only. The price of running allocations does not change.

    `share` is gpu for whole GPUs, mig for MIG instances of `mig_profile`, or mps for MPS shares with at least
    `share_memory_bytes_min` of GPU memory. Counts and prices are then those of shares.
    """

    description: Annotated[str, Meta(max_length=255)]
    gpu_model: Annotated[str, Meta(max_length=127)]
    gpu_counts: Annotated[list[Annotated[int, Meta(ge=1, le=1024)]], Meta(min_length=1, max_length=32)]
    price_microusd_per_gpu_hour: Annotated[int, Meta(ge=0, le=10**12)]
    memory_bytes_per_gpu: Annotated[int, Meta(ge=64 << 20, le=1 << 44)]
    cpus_per_gpu: Annotated[float, Meta(gt=0, le=1024)]
    processes_max: Annotated[int, Meta(ge=16, le=1_000_000)] = 4096
    scratch_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 50)] = 10 << 30
    share: Literal["gpu", "mig", "mps"] = "gpu"
    mig_profile: Annotated[str, Meta(max_length=31)] = ""
    share_memory_bytes_min: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    enabled: bool = True


class SkuUpdate(Body, frozen=True):
    """Change an offer; operators only. Fields that are not given stay as they are."""

    description: Annotated[str, Meta(max_length=255)] | None = None
    gpu_model: Annotated[str, Meta(max_length=127)] | None = None
    gpu_counts: Annotated[list[Annotated[int, Meta(ge=1, le=1024)]], Meta(min_length=1, max_length=32)] | None = None
    price_microusd_per_gpu_hour: Annotated[int, Meta(ge=0, le=10**12)] | None = None
    memory_bytes_per_gpu: Annotated[int, Meta(ge=64 << 20, le=1 << 44)] | None = None
    cpus_per_gpu: Annotated[float, Meta(gt=0, le=1024)] | None = None
    processes_max: Annotated[int, Meta(ge=16, le=1_000_000)] | None = None
    scratch_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 50)] | None = None
    share: Literal["gpu", "mig", "mps"] | None = None
    mig_profile: Annotated[str, Meta(max_length=31)] | None = None
    share_memory_bytes_min: Annotated[int, Meta(ge=0, le=1 << 50)] | None = None
    enabled: bool | None = None


class Sku(msgspec.Struct, frozen=True, kw_only=True):
    """An offer. `gpu_model` is a model name or `*`; `share` is gpu, mig or mps."""

    name: str
    description: str
    gpu_model: str
    gpu_counts: list[int]
    price_microusd_per_gpu_hour: int
    memory_bytes_per_gpu: int
    cpus_per_gpu: float
    processes_max: int
    scratch_bytes: int
    enabled: bool
    gpus_free: int
    share: str = "gpu"
    mig_profile: str = ""
    share_memory_bytes_min: int = 0


class QuotaPut(Body, frozen=True):
    """How many GPUs a project may hold at once."""

    gpus_max: Annotated[int, Meta(ge=0, le=1_000_000)]


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """A project's limit and what it uses now."""

    project_id: str
    gpus_max: int
    gpus_used: int


class StockFloorPut(Body, frozen=True):
    """How many units are kept ready that have this many GPUs and this image; operators only."""

    floor: Annotated[int, Meta(ge=0, le=1000)]
    gpus: int = 1
    image: Annotated[str, Meta(max_length=255)] = "python:3"


class StockFloor(msgspec.Struct, frozen=True, kw_only=True):
    """A floor, and what there is. `handed_over` counts the last hour; `reason` says why the stock is short."""

    sku: str
    gpus: int
    image: str
    floor: int
    ready: int
    starting: int
    handed_over: int
    reason: str


class SecretUse(Body, frozen=True):
    """A secret of the project for a unit: the file /run/secrets/<name> and, if `env` is given, that variable."""

    name: Slug
    env: Annotated[str, Meta(max_length=128)] = ""


class AllocationCreate(Body, frozen=True):
    """Rent GPUs. `wait_s` > 0 waits that long for capacity instead of being refused at once. `runtime` names an
    environment of the project's, built from a lock file, in place of the image's own. `id` is the client's own choice:
    `alc_` and 26 characters that begin with the time, so that it knows the id whatever becomes of the answer."""

    sku: Slug
    id: Annotated[str, Meta(max_length=30)] | None = None
    gpus: int = 1
    name: Name | None = None
    image: Annotated[str, Meta(max_length=255)] = "python:3"
    labels: Labels = {}
    env: Annotated[dict[str, str], Meta(max_length=64)] = {}
    command: Annotated[list[Annotated[str, Meta(max_length=4096)]], Meta(max_length=256)] = []
    ports: Annotated[list[Annotated[int, Meta(ge=1, le=65535)]], Meta(max_length=32)] = []
    secrets: Annotated[list[SecretUse], Meta(max_length=32)] = []
    runtime: Slug | None = None
    wait_s: Annotated[int, Meta(ge=0, le=7 * 24 * 3600)] = 0


class RuntimePut(Body, frozen=True, kw_only=True):
    """Define or change an environment: the packages of a lock on top of a base image. Every line of the lock is
    `name==version` with at least one `--hash=sha256:…`. What was made with it before stays as it is."""

    base: Annotated[str, Meta(max_length=255)] = "python:3"
    lock: Annotated[str, Meta(max_length=512 << 10)]


class Runtime(msgspec.Struct, frozen=True, kw_only=True):
    """An environment of a project. `digest` names its content, `version` counts its changes; `lock` is in its normal
    form, and left out of lists."""

    name: str
    digest: str
    base: str
    packages: int
    version: int
    created_at: Time
    updated_at: Time
    lock: str = ""


class ResolutionCreate(Body, frozen=True, kw_only=True):
    """Resolve packages by name to a lock for a base image. Each line of `requirements` is a name with optional extras,
    versions and a marker: no URL, no path, no option. What was resolved before from the same text is answered again,
    unless `upgrade` is true."""

    requirements: Annotated[str, Meta(max_length=64 << 10)]
    base: Annotated[str, Meta(max_length=255)] = "python:3"
    upgrade: bool = False


class Resolution(msgspec.Struct, frozen=True, kw_only=True):
    """Requirements on their way to a lock. `python` is the version that the lock is for; `lock` can be put as a
    runtime. When it failed, `error_code` is unresolvable, index_away, no_node, resolve_timeout, no_installer,
    unknown_image, bad_lock or resolve_failed, and `error` says it in words. Before, they say why the last node that was
    asked could not."""

    id: str
    state: Literal["queued", "running", "succeeded", "failed"]
    base: str
    requirements: str
    python: str
    lock: str
    error_code: str
    error: str
    created_at: Time
    finished_at: Time | None


class EgressRules(Body, frozen=True):
    """Where a project's units may connect to, such as `pypi.org`, `*.example.com:443` or `*`; none means nowhere."""

    rules: Annotated[list[Annotated[str, Meta(min_length=1, max_length=300)]], Meta(max_length=100)]


class AllocationUpdate(Body, frozen=True):
    """Change the name or the labels."""

    name: Name | None = None
    labels: Labels | None = None


class TimelineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One move of the state machine."""

    state: AllocationState
    at: Time
    reason: str


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """A claim of a project on a slice of a node. `reason` says why it waits, failed or is being released. `runtime` is
    the digest of its environment, empty for the image's own."""

    id: str
    project_id: str
    name: str | None
    purpose: AllocationPurpose
    sku: str
    gpus: int
    image: str
    state: AllocationState
    reason: str
    labels: dict[str, str]
    ports: list[int]
    node_id: str | None
    gpu_uuids: list[str]
    simulated: bool
    price_microusd_per_hour: int
    created_at: Time
    active_at: Time | None
    ended_at: Time | None
    deadline_at: Time | None
    version: int
    access_urls: dict[str, str]
    runtime: str = ""
    timeline: list[TimelineEntry] = []


class ReleaseRequest(Body, frozen=True):
    """Why; shown on the allocation."""

    reason: Annotated[str, Meta(max_length=255)] = ""

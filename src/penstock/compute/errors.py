"""Why compute refuses. Each reason has a code of its own, so that a person knows what would help."""

from penstock.kit.errors import Conflict, Denied, Invalid, Kind, PenstockError


class Policy(Denied):
    """The caller's role does not allow it."""

    code = "compute.policy"


class QuotaExceeded(PenstockError):
    """The project would hold more GPUs than it may."""

    kind = Kind.EXHAUSTED
    code = "compute.quota_exceeded"


class OutOfCapacity(PenstockError):
    """Not enough free GPUs anywhere."""

    kind = Kind.EXHAUSTED
    code = "compute.out_of_capacity"


class NoSingleNode(PenstockError):
    """Enough free GPUs in total, too few on any one node."""

    kind = Kind.EXHAUSTED
    code = "compute.no_single_node"


class Unhealthy(PenstockError):
    """Enough GPUs would be there, were some of them not out of service."""

    kind = Kind.EXHAUSTED
    code = "compute.unhealthy"


class UnknownSku(Invalid):
    """No such offer, or it is closed."""

    code = "compute.unknown_sku"


class BadId(Invalid):
    """The id that the client chose is not one, or not of now."""

    code = "compute.bad_id"


class IdTaken(Conflict):
    """The id that the client chose was used before."""

    code = "compute.id_taken"


class SkuInUse(Conflict):
    """Something that has not ended was made with the offer."""

    code = "compute.sku_in_use"


class BadGpuCount(Invalid):
    """The offer does not come in this size."""

    code = "compute.bad_gpu_count"


class BadImage(Invalid):
    """The image's name is malformed."""

    code = "compute.bad_image"


class BadDigest(BadImage):
    """The image's digest is malformed."""

    code = "compute.bad_digest"


class ReservedEnv(Invalid):
    """The variable steers the loader, the driver or the platform."""

    code = "compute.reserved_env"


class BadLock(Invalid):
    """The lock file is not one, or would lead the installer elsewhere."""

    code = "compute.bad_lock"


class BadRequirements(Invalid):
    """The requirements name something else than packages."""

    code = "compute.bad_requirements"


class TooManyResolutions(PenstockError):
    """As many requirements of the project are being resolved as may be at once."""

    kind = Kind.EXHAUSTED
    code = "compute.too_many_resolutions"


class RuntimeNamedByDigest(Conflict):
    """The name says which lock it means, and versions of functions rely on it."""

    code = "compute.runtime_named_by_digest"


class UnknownRuntime(Invalid):
    """The project has no such environment."""

    code = "compute.unknown_runtime"


class RuntimeInUse(Conflict):
    """An allocation that has not ended was made with it, or a version of a function names it."""

    code = "compute.runtime_in_use"


class TooManyRuntimes(PenstockError):
    """The project has as many environments as it may."""

    kind = Kind.EXHAUSTED
    code = "compute.too_many_runtimes"

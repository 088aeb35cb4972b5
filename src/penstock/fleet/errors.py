"""What can go wrong in the fleet, for callers."""

from penstock.kit.errors import Conflict, Denied, Invalid, Kind, PenstockError, Unauthenticated


class TokenRefused(Unauthenticated):
    """The enrolment or recovery token is unknown, used, expired or for another node."""

    code = "fleet.token_refused"


class CertificateRefused(Unauthenticated):
    """The client certificate is not one of a node in good standing."""

    code = "fleet.certificate_refused"


class BadRequest(Invalid):
    """The certificate signing request cannot be used."""

    code = "fleet.bad_csr"


class SecretShownBefore(Conflict):
    """The token was shown to the first call with this key, which came with another credential."""

    code = "fleet.secret_shown_before"


class NameTaken(Conflict):
    """Another node has this name."""

    code = "fleet.name_taken"


class IllegalMove(Conflict):
    """The node's state does not allow this."""

    code = "fleet.illegal_move"


class NodeInUse(Conflict):
    """Allocations still hold slots of the node."""

    code = "fleet.node_in_use"


class SlotNotBlocked(Conflict):
    """Only a slot whose cleanup is blocked can be forced clean."""

    code = "fleet.slot_not_blocked"


class SlotHeld(Conflict):
    """An allocation still holds the slot."""

    code = "fleet.slot_held"


class AbsenceNotVerified(Invalid):
    """Somebody has to have looked before a slot is forced clean."""

    code = "fleet.absence_not_verified"


class StaleFence(Conflict):
    """A task under a higher fence was dispatched for this allocation."""

    code = "fleet.stale_fence"


class TaskTooBig(Invalid):
    """The task's parameters are too large."""

    code = "fleet.task_too_big"


class SecretsRefused(Denied):
    """The task is not one whose secrets this link may have."""

    code = "fleet.secrets_refused"


class NotLeased(Conflict):
    """The task is open, but not with this link yet: asking again may help."""

    code = "fleet.not_leased"


class TooMany(PenstockError):
    """Asked too often; wait."""

    kind = Kind.EXHAUSTED
    code = "fleet.too_many_requests"


class GpuNotQuarantined(Conflict):
    """Only a GPU in quarantine can be returned."""

    code = "fleet.gpu_not_quarantined"

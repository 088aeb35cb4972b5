"""Why something in a unit cannot be reached."""

from typing import Final

from penstock.kit.errors import Conflict, Denied, Kind, NotFound, PenstockError, Unavailable
from penstock.kit.stream import StreamAborted


class NotActive(Conflict):
    """The allocation has no running unit now."""

    code = "access.not_active"


class NodeUnreachable(Unavailable):
    """The node's tunnel is not there."""

    code = "access.node_unreachable"


class PortRefused(PenstockError):
    """Nothing listens on that port of the unit."""

    kind = Kind.UNAVAILABLE
    code = "access.port_refused"


class BadResponse(PenstockError):
    """What listens there did not answer in HTTP, or broke off."""

    kind = Kind.UNAVAILABLE
    code = "access.bad_response"


class UnitTimeout(PenstockError):
    """What listens there took too long to answer."""

    kind = Kind.UNAVAILABLE
    code = "access.unit_timeout"


class TooLarge(PenstockError):
    """The request's body is larger than a gateway carries."""

    kind = Kind.INVALID
    code = "payload_too_large"


class OriginRefused(Denied):
    """A page of another site tried to open a WebSocket."""

    code = "access.origin_refused"


class BrowserRefused(Denied):
    """A browser added the key by itself, and nothing shows that its owner wanted that."""

    code = "access.browser_refused"


class NotRunnable(PenstockError):
    """The node refused to run the command."""

    kind = Kind.INVALID
    code = "access.not_runnable"


_NOT_RUNNABLE: Final = frozenset({"refused", "malformed", "reserved_env", "too_large", "not_found", "not_executable"})


def from_abort(error: StreamAborted, *, port: int | None = None) -> PenstockError:
    """The customer's view of a stream's end. `port` is none for a command."""
    if error.code == "no_unit":
        return NotFound("the allocation's unit is not on its node")
    if error.code == "refused" and port is not None:
        return PortRefused(f"nothing in the unit listens on port {port}", retry_after_s=1)
    if error.code in ("lost", "no_node"):
        return NodeUnreachable("the node's connection was lost; try again", retry_after_s=2)
    if error.code == "exhausted":
        return Unavailable("the node's tunnel is full; try again", retry_after_s=2)
    if port is None and error.code in _NOT_RUNNABLE:
        return NotRunnable(error.detail or error.code, field="argv")
    return BadResponse(error.detail or "the unit closed the connection without an answer")

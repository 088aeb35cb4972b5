"""What can go wrong between the sidecar and a unit's framework. Everything a framework says is a tenant's word."""

from penstock.node.errors import NodeError


class Unready(NodeError):
    """The framework's socket cannot be used now; looking again later may help."""


class Refusal(NodeError):
    """The framework's socket must not be used, and time will not change that."""


class BrokenAnswer(NodeError):
    """The framework answered, but not by HTTP or not by the contract."""


class LostConnection(NodeError):
    """The connection broke before the answer was complete. `begun` says whether any of it had come, `finished` whether
    it was the reply itself: then the handler had ended."""

    def __init__(self, detail: str, *, begun: bool, finished: bool = False) -> None:
        super().__init__("connection_lost", detail)
        self.begun = begun
        self.finished = finished


class NotSpooled(NodeError):
    """The answer could not be kept on this node until it was complete: its disk is full, say."""

    def __init__(self, error: OSError) -> None:
        super().__init__("not_spooled", f"the node could not keep the answer: {error.strerror or error}")


class TooLarge(NodeError):
    """The answer is larger than a result may be."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__("result_too_large", f"the result is larger than {bytes_max} bytes")

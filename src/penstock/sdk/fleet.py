"""GPU hosts, for operators."""

from penstock.sdk.protocol import Listing, Steps, call, identifier
from penstock.sdk.resources import Resource, X, listing, operation
from penstock.wire import rest
from penstock.wire.rest import Page


class Nodes(Resource[X]):
    """GPU hosts."""

    @listing
    def list(self, *, state: str | None = None, limit: int | None = None) -> Listing[rest.Node]:
        """All nodes, or those in one state."""
        return Listing(path="/nodes", answer=Page[rest.Node], query={"state": state}, limit=limit)

    @operation
    def get(self, node_id: str) -> Steps[rest.Node]:
        """One node with its GPUs."""
        return call("GET", _node(node_id), rest.Node)

    @operation
    def enrolment_token(self, node_name: str, *, gpus_approved: int = 1024) -> Steps[rest.EnrolmentToken]:
        """A single-use token that lets a host become the node of this name."""
        body = rest.EnrolmentTokenCreate(node_name=node_name, gpus_approved=gpus_approved)
        return call("POST", "/nodes/enrolment-tokens", rest.EnrolmentToken, body=body, create=True)

    @operation
    def recovery_token(self, node_id: str) -> Steps[rest.EnrolmentToken]:
        """A token that gives a node whose certificate was lost a new one."""
        return call("POST", f"{_node(node_id)}/recovery-tokens", rest.EnrolmentToken, create=True)

    @operation
    def cordon(self, node_id: str, *, reason: str = "") -> Steps[rest.Node]:
        """Place nothing new on it."""
        return _change(node_id, "cordon", reason)

    @operation
    def uncordon(self, node_id: str, *, reason: str = "") -> Steps[rest.Node]:
        """Place on it again."""
        return _change(node_id, "uncordon", reason)

    @operation
    def drain(self, node_id: str, *, grace_s: int = 0, reason: str = "") -> Steps[rest.Node]:
        """Place nothing new on it, and release what still runs there after the grace."""
        body = rest.NodeDrain(reason=reason, grace_s=grace_s)
        return call("POST", f"{_node(node_id)}/drain", rest.Node, body=body)

    @operation
    def revoke(self, node_id: str, *, reason: str = "") -> Steps[rest.Node]:
        """Take its certificate away: it is out within seconds."""
        return _change(node_id, "revoke", reason)

    @operation
    def retire(self, node_id: str, *, reason: str = "") -> Steps[rest.Node]:
        """Remove it for good."""
        return _change(node_id, "retire", reason)

    @operation
    def force_cleanup(self, node_id: str, slot_id: str, *, reason: str = "") -> Steps[rest.NodeGpu]:
        """Give back a slot whose cleanup could not be proved: you vouch that nothing of its last tenant is left."""
        path = f"{_slot(node_id, slot_id)}/force-cleanup"
        body = rest.SlotCleanup(runtime_verified_absent=True, reason=reason)
        return call("POST", path, rest.NodeGpu, body=body)

    @operation
    def quarantine_gpu(
        self, node_id: str, slot_id: str, *, reason: str = "", drain: bool = False
    ) -> Steps[rest.NodeGpu]:
        """Take a slot's GPU out of service; with `drain`, what runs on it has to leave."""
        body = rest.GpuQuarantineOrder(reason=reason, drain=drain)
        return call("POST", f"{_slot(node_id, slot_id)}/quarantine", rest.NodeGpu, body=body)

    @operation
    def return_gpu(self, node_id: str, slot_id: str) -> Steps[rest.NodeGpu]:
        """Have a quarantined GPU probed; it returns when that passes, which `get` shows."""
        return call("POST", f"{_slot(node_id, slot_id)}/return", rest.NodeGpu)

    @listing
    def tasks(self, node_id: str, *, limit: int | None = None) -> Listing[rest.Task]:
        """What the node was asked to do."""
        return Listing(path=f"{_node(node_id)}/tasks", answer=Page[rest.Task], limit=limit)


class Fleet(Resource[X]):
    """The fleet as a whole; operators only."""

    @operation
    def overview(self, *, nodes_max: int = 200) -> Steps[rest.FleetOverview]:
        """Counts, and the busiest and the troubled nodes first."""
        return call("GET", "/fleet/overview", rest.FleetOverview, query={"nodes_max": nodes_max})

    @listing
    def problems(self) -> Listing[rest.Problem]:
        """What does not get on by itself, why, and what to do."""
        return Listing(path="/fleet/problems", answer=Page[rest.Problem], paged=False)


def _node(node_id: str) -> str:
    return f"/nodes/{identifier('nod', node_id, name='node_id')}"


def _slot(node_id: str, slot_id: str) -> str:
    return f"{_node(node_id)}/slots/{identifier('slt', slot_id, name='slot_id')}"


def _change(node_id: str, verb: str, reason: str) -> Steps[rest.Node]:
    return call("POST", f"{_node(node_id)}/{verb}", rest.Node, body=rest.NodeStateChange(reason=reason))

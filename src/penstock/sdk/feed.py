"""What happened: events, the audit log, and events that the broker refused."""

from urllib.parse import quote

from penstock.sdk.protocol import Listing, Steps, call, identifier
from penstock.sdk.resources import Resource, X, listing, operation, stream
from penstock.sdk.sse import Follower
from penstock.wire import rest
from penstock.wire.rest import Page


class Events(Resource[X]):
    """Facts of the current project."""

    @listing
    def list(
        self,
        *,
        event_type: str | None = None,
        aggregate_id: str | None = None,
        newest_first: bool = False,
        limit: int | None = None,
    ) -> Listing[rest.EventOut]:
        """Past events, oldest first unless said otherwise."""
        query = {
            "event_type": event_type,
            "aggregate_id": aggregate_id,
            "order": "desc" if newest_first else "asc",
        }
        return Listing(path="/events", answer=Page[rest.EventOut], query=query, limit=limit)

    @stream
    def follow(
        self, *, after: str | None = None, event_type: str | None = None, aggregate_id: str | None = None
    ) -> Follower:
        """Live events, without end. Broken connections resume where they broke off; `after` is an event's cursor."""
        return Follower(after, event_type=event_type, aggregate_id=aggregate_id)


class Audit(Resource[X]):
    """Who did what."""

    @listing
    def list(
        self,
        *,
        action: str | None = None,
        actor_id: str | None = None,
        target_id: str | None = None,
        correlation_id: str | None = None,
        limit: int | None = None,
    ) -> Listing[rest.AuditEntry]:
        """Entries, newest first."""
        query = {"action": action, "actor_id": actor_id, "target_id": target_id, "correlation_id": correlation_id}
        return Listing(path="/audit", answer=Page[rest.AuditEntry], query=query, limit=limit)

    @listing
    def chains(self) -> Listing[rest.AuditChain]:
        """Every hash chain and where it ends; operators only."""
        return Listing(path="/audit/chains", answer=Page[rest.AuditChain], paged=False)

    @listing
    def links(self, chain: str) -> Listing[rest.ChainedAudit]:
        """One chain from its beginning; operators only."""
        return Listing(path=f"/audit/chains/{quote(chain, safe='')}", answer=Page[rest.ChainedAudit])

    @operation
    def evidence(self, correlation_id: str) -> Steps[rest.Evidence]:
        """Everything that belongs to one request; operators only."""
        return call("GET", f"/evidence/{quote(correlation_id, safe='')}", rest.Evidence)


class DeadLetters(Resource[X]):
    """Events that the broker refused for good; operators only."""

    @listing
    def list(self, *, limit: int | None = None) -> Listing[rest.DeadLetterOut]:
        """All of them."""
        return Listing(path="/dead-letters", answer=Page[rest.DeadLetterOut], limit=limit)

    @operation
    def requeue(self, event_id: str) -> Steps[None]:
        """Publish it again."""
        return call("POST", f"/dead-letters/{_event(event_id)}/requeue", type(None))

    @operation
    def discard(self, event_id: str) -> Steps[None]:
        """Give it up."""
        return call("DELETE", f"/dead-letters/{_event(event_id)}", type(None))


def _event(event_id: str) -> str:
    return identifier("evt", event_id, name="event_id")

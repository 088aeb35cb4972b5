"""Logging in with an identity provider: sessions, and the providers themselves for operators."""

from collections.abc import Sequence

from penstock.sdk.protocol import Listing, Steps, call, identifier, slug
from penstock.sdk.resources import Resource, X, listing, operation
from penstock.wire import rest
from penstock.wire.rest import Page


class Sessions(Resource[X]):
    """A person's logins."""

    @operation
    def document(self) -> Steps[rest.LoginDocument]:
        """How to log in; needs no key."""
        return call("GET", "/login", rest.LoginDocument)

    @operation
    def create(self, token: str, *, nonce: str | None = None) -> Steps[rest.SessionCreated]:
        """Exchange a provider's token for a session; needs no key. The session's token is in this answer only."""
        body = rest.SessionCreate(token=token, nonce=nonce)
        return call("POST", "/sessions", rest.SessionCreated, body=body, create=True)

    @listing
    def list(self, *, principal_id: str | None = None, limit: int | None = None) -> Listing[rest.LoginSession]:
        """One's own sessions; anyone's for operators."""
        if principal_id is not None:
            identifier("usr", principal_id, name="principal_id")
        return Listing(
            path="/sessions", answer=Page[rest.LoginSession], query={"principal_id": principal_id}, limit=limit
        )

    @operation
    def revoke(self, session_id: str) -> Steps[None]:
        """End a session."""
        return call("DELETE", f"/sessions/{identifier('ses', session_id, name='session_id')}", type(None))

    @operation
    def end(self) -> Steps[None]:
        """End the session that this client uses."""
        return call("DELETE", "/sessions/current", type(None))


class Mappings(Resource[X]):
    """What a provider's groups may do."""

    @listing
    def list(self, provider: str, *, limit: int | None = None) -> Listing[rest.GroupMapping]:
        """All of one provider."""
        return Listing(path=f"{_provider(provider)}/mappings", answer=Page[rest.GroupMapping], limit=limit)

    @operation
    def create(
        self,
        provider: str,
        group: str,
        *,
        role: str | None = None,
        project_id: str | None = None,
        organisation_id: str | None = None,
        operator: bool = False,
    ) -> Steps[rest.GroupMapping]:
        """Let a group have a role in a project or an organisation, or be operators."""
        body = rest.MappingCreate(
            group=group, role=role, project_id=project_id, organisation_id=organisation_id, operator=operator
        )
        return call("POST", f"{_provider(provider)}/mappings", rest.GroupMapping, body=body, create=True)

    @operation
    def delete(self, provider: str, mapping_id: str) -> Steps[None]:
        """Take it away."""
        path = f"{_provider(provider)}/mappings/{identifier('map', mapping_id, name='mapping_id')}"
        return call("DELETE", path, type(None))


class IdentityProviders(Resource[X]):
    """Whom people log in with; operators only."""

    def __init__(self, executor: X) -> None:
        super().__init__(executor)
        self.mappings = Mappings(executor)

    @listing
    def list(self, *, limit: int | None = None) -> Listing[rest.IdentityProvider]:
        """All of them."""
        return Listing(path="/identity-providers", answer=Page[rest.IdentityProvider], limit=limit)

    @operation
    def get(self, name: str) -> Steps[rest.IdentityProvider]:
        """One of them."""
        return call("GET", _provider(name), rest.IdentityProvider)

    @operation
    def put(
        self,
        name: str,
        *,
        issuer: str,
        client_id: str,
        client_secret: str = "",
        audiences: Sequence[str] = (),
        scopes: Sequence[str] = ("openid", "profile", "email"),
        groups_claim: str = "groups",
        session_s: int = 12 * 3600,
        enabled: bool = True,
    ) -> Steps[rest.IdentityProvider]:
        """Make or change one."""
        body = rest.ProviderPut(
            issuer=issuer,
            client_id=client_id,
            client_secret=client_secret,
            audiences=[*audiences],
            scopes=[*scopes],
            groups_claim=groups_claim,
            session_s=session_s,
            enabled=enabled,
        )
        return call("PUT", _provider(name), rest.IdentityProvider, body=body)

    @operation
    def delete(self, name: str) -> Steps[None]:
        """Remove one; its people's sessions end."""
        return call("DELETE", _provider(name), type(None))


def _provider(name: str) -> str:
    return f"/identity-providers/{slug(name, name='provider')}"

"""Who may do what: organisations, projects, members, users, service accounts and keys."""

from penstock.sdk.protocol import Listing, Steps, call, identifier
from penstock.sdk.resources import Resource, X, listing, operation
from penstock.wire import rest
from penstock.wire.rest import Page


class Organisations(Resource[X]):
    """Customers; operators make them."""

    @listing
    def list(self, *, limit: int | None = None) -> Listing[rest.Organisation]:
        """The organisations that this key may see."""
        return Listing(path="/organisations", answer=Page[rest.Organisation], limit=limit)

    @operation
    def create(self, name: str) -> Steps[rest.Organisation]:
        """A new organisation."""
        return call("POST", "/organisations", rest.Organisation, body=rest.OrganisationCreate(name=name), create=True)


class Members(Resource[X]):
    """Roles of principals in a project."""

    @listing
    def list(self, project_id: str, *, limit: int | None = None) -> Listing[rest.Member]:
        """Everyone with a role in the project."""
        return Listing(path=f"{_project(project_id)}/members", answer=Page[rest.Member], limit=limit)

    @operation
    def put(self, project_id: str, principal_id: str, *, role: str) -> Steps[rest.Member]:
        """Give or change a role."""
        path = f"{_project(project_id)}/members/{_principal(principal_id)}"
        return call("PUT", path, rest.Member, body=rest.MemberPut(role=role))

    @operation
    def remove(self, project_id: str, principal_id: str) -> Steps[None]:
        """Take the role away."""
        return call("DELETE", f"{_project(project_id)}/members/{_principal(principal_id)}", type(None))


class Projects(Resource[X]):
    """The scope of everything that people create."""

    def __init__(self, executor: X) -> None:
        super().__init__(executor)
        self.members = Members(executor)

    @listing
    def list(self, *, limit: int | None = None) -> Listing[rest.Project]:
        """The projects that this key may see."""
        return Listing(path="/projects", answer=Page[rest.Project], limit=limit)

    @operation
    def create(self, name: str, *, organisation_id: str | None = None) -> Steps[rest.Project]:
        """A new project."""
        body = rest.ProjectCreate(name=name, organisation_id=organisation_id)
        return call("POST", "/projects", rest.Project, body=body, create=True)

    @operation
    def get(self, project_id: str) -> Steps[rest.Project]:
        """One project."""
        return call("GET", _project(project_id), rest.Project)

    @operation
    def update(self, project_id: str, *, name: str) -> Steps[rest.Project]:
        """Rename."""
        return call("PATCH", _project(project_id), rest.Project, body=rest.ProjectUpdate(name=name))

    @operation
    def delete(self, project_id: str) -> Steps[None]:
        """Delete an empty project."""
        return call("DELETE", _project(project_id), type(None))

    @operation
    def quota(self, project_id: str) -> Steps[rest.Quota]:
        """How many GPUs the project may hold, and holds."""
        return call("GET", f"{_project(project_id)}/quota", rest.Quota)

    @operation
    def set_quota(self, project_id: str, *, gpus_max: int) -> Steps[rest.Quota]:
        """Change the limit; operators only."""
        return call("PUT", f"{_project(project_id)}/quota", rest.Quota, body=rest.QuotaPut(gpus_max=gpus_max))


class Users(Resource[X]):
    """People."""

    @listing
    def list(self, *, limit: int | None = None) -> Listing[rest.User]:
        """The people that this key may see."""
        return Listing(path="/users", answer=Page[rest.User], limit=limit)

    @operation
    def create(self, *, issuer: str, subject: str, display_name: str) -> Steps[rest.User]:
        """Make a person known by their identity provider's issuer and subject."""
        body = rest.UserCreate(issuer=issuer, subject=subject, display_name=display_name)
        return call("POST", "/users", rest.User, body=body, create=True)

    @operation
    def disable(self, user_id: str) -> Steps[rest.User]:
        """Shut a person out; operators only."""
        return call("POST", f"/users/{identifier('usr', user_id, name='user_id')}/disable", rest.User)

    @operation
    def enable(self, user_id: str) -> Steps[rest.User]:
        """Let a person in again; operators only."""
        return call("POST", f"/users/{identifier('usr', user_id, name='user_id')}/enable", rest.User)


class ServiceAccounts(Resource[X]):
    """Principals for programs."""

    @listing
    def list(self, *, limit: int | None = None) -> Listing[rest.ServiceAccount]:
        """Those of the current project."""
        return Listing(path="/service-accounts", answer=Page[rest.ServiceAccount], limit=limit)

    @operation
    def create(self, name: str, *, role: str) -> Steps[rest.ServiceAccount]:
        """A new one in the current project."""
        body = rest.ServiceAccountCreate(name=name, role=role)
        return call("POST", "/service-accounts", rest.ServiceAccount, body=body, create=True)

    @operation
    def get(self, service_account_id: str) -> Steps[rest.ServiceAccount]:
        """One of them."""
        return call("GET", _service_account(service_account_id), rest.ServiceAccount)

    @operation
    def delete(self, service_account_id: str) -> Steps[None]:
        """Delete it; its keys stop working."""
        return call("DELETE", _service_account(service_account_id), type(None))


class Keys(Resource[X]):
    """API keys."""

    @listing
    def list(self, *, limit: int | None = None) -> Listing[rest.Key]:
        """The keys that this one may see, without their secrets."""
        return Listing(path="/keys", answer=Page[rest.Key], limit=limit)

    @operation
    def create(
        self, name: str, *, role: str, service_account_id: str | None = None, expires_in_s: int | None = None
    ) -> Steps[rest.KeyCreated]:
        """A new key. Its secret is in this answer and nowhere else."""
        if service_account_id is not None:
            identifier("sva", service_account_id, name="service_account_id")
        body = rest.KeyCreate(name=name, role=role, service_account_id=service_account_id, expires_in_s=expires_in_s)
        return call("POST", "/keys", rest.KeyCreated, body=body, create=True)

    @operation
    def get(self, key_id: str) -> Steps[rest.Key]:
        """One key, without its secret."""
        return call("GET", f"/keys/{identifier('key', key_id, name='key_id')}", rest.Key)

    @operation
    def revoke(self, key_id: str) -> Steps[None]:
        """Make a key worthless."""
        return call("DELETE", f"/keys/{identifier('key', key_id, name='key_id')}", type(None))


def _project(project_id: str) -> str:
    return f"/projects/{identifier('prj', project_id, name='project_id')}"


def _service_account(service_account_id: str) -> str:
    return f"/service-accounts/{identifier('sva', service_account_id, name='service_account_id')}"


def _principal(principal_id: str) -> str:
    prefix = "sva" if principal_id.startswith("sva_") else "usr"
    return identifier(prefix, principal_id, name="principal_id")

"""Organisations, projects, people, keys, identity providers and sessions."""

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.wire.rest.common import Body, Name
from penstock.wire.rest.states import PrincipalKind, ProjectRole
from penstock.wire.times import Time

#: A provider's token, an audience or a client's name: printable ASCII, so that it can stand in a header or a URL.
Token = Annotated[str, Meta(min_length=1, max_length=16_384, pattern=r"^[\x21-\x7e]+$(?!\n)")]
Printable = Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[\x21-\x7e]+$(?!\n)")]
GroupName = Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f]+$(?!\n)")]


class Whoami(msgspec.Struct, frozen=True, kw_only=True):
    """The caller as the server sees it."""

    principal_id: str
    principal_kind: PrincipalKind
    display_name: str
    organisation_id: str
    project_id: str
    role: ProjectRole
    operator: bool
    key_id: str | None
    #: The session that the caller logged in with, if not by a key.
    session_id: str | None = None
    #: Where units' ports and commands are reached.
    gateway_url: str


class OrganisationCreate(Body, frozen=True):
    """A new organisation; operators only."""

    name: Name


class Organisation(msgspec.Struct, frozen=True, kw_only=True):
    """A customer: owns projects and pays for them."""

    id: str
    name: str
    created_at: Time


class ProjectCreate(Body, frozen=True):
    """A new project in the caller's organisation; operators may name another."""

    name: Name
    organisation_id: str | None = None


class ProjectUpdate(Body, frozen=True):
    """Rename."""

    name: Name


class Project(msgspec.Struct, frozen=True, kw_only=True):
    """The scope of everything that people create."""

    id: str
    organisation_id: str
    name: str
    created_at: Time


class MemberPut(Body, frozen=True):
    """Give a principal a role in a project: owner, admin, developer, viewer, billing."""

    role: ProjectRole


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A principal's role in a project."""

    principal_id: str
    principal_kind: PrincipalKind
    display_name: str
    role: ProjectRole
    created_at: Time


class UserCreate(Body, frozen=True):
    """A person known by an identity provider's issuer and subject."""

    issuer: Annotated[str, Meta(min_length=1, max_length=255)]
    subject: Annotated[str, Meta(min_length=1, max_length=255)]
    display_name: Name


class User(msgspec.Struct, frozen=True, kw_only=True):
    """A person."""

    id: str
    issuer: str
    subject: str
    display_name: str
    created_at: Time
    disabled_at: Time | None = None


class ServiceAccountCreate(Body, frozen=True):
    """A principal for programs, with a role in the current project that is no higher than the caller's."""

    name: Name
    role: ProjectRole


class ServiceAccount(msgspec.Struct, frozen=True, kw_only=True):
    """A principal for programs."""

    id: str
    project_id: str
    name: str
    role: ProjectRole
    created_at: Time


class KeyCreate(Body, frozen=True):
    """A new API key in the current project. It belongs to the caller, or to a service account of the project, and
    its role is at most the caller's and its owner's."""

    name: Name
    role: ProjectRole
    service_account_id: str | None = None
    expires_in_s: Annotated[int, Meta(ge=60, le=366 * 24 * 3600)] | None = None


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret."""

    id: str
    name: str
    hint: str
    role: ProjectRole
    principal_id: str
    project_id: str
    created_at: Time
    expires_at: Time | None
    revoked_at: Time | None
    last_used_at: Time | None


class KeyCreated(msgspec.Struct, frozen=True, kw_only=True):
    """The only answer that ever shows the secret."""

    key: Key
    secret: str


class ProviderPut(Body, frozen=True):
    """An identity provider that people log in with. `issuer` is exactly what its tokens and its discovery document say.
    Tokens are taken whose audience is `client_id` or one of `audiences`."""

    issuer: Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^https?://[\x21-\x7e]+$(?!\n)")]
    client_id: Printable
    #: Only for providers that want one from programs on people's machines. Everyone can read it.
    client_secret: Annotated[str, Meta(max_length=255, pattern=r"^[\x21-\x7e]*$(?!\n)")] = ""
    audiences: Annotated[list[Printable], Meta(max_length=20)] = []
    scopes: Annotated[list[Printable], Meta(max_length=20)] = msgspec.field(
        default_factory=lambda: ["openid", "profile", "email"]
    )
    #: The claim that lists a person's groups.
    groups_claim: Printable = "groups"
    #: How long a session lasts.
    session_s: Annotated[int, Meta(ge=60, le=7 * 24 * 3600)] = 12 * 3600
    enabled: bool = True


class IdentityProvider(msgspec.Struct, frozen=True, kw_only=True):
    """An identity provider as it is configured."""

    name: str
    issuer: str
    client_id: str
    client_secret: str
    audiences: list[str]
    scopes: list[str]
    groups_claim: str
    session_s: int
    enabled: bool
    created_at: Time


class LoginProvider(msgspec.Struct, frozen=True, kw_only=True):
    """What a program needs to log a person in."""

    name: str
    issuer: str
    client_id: str
    client_secret: str
    scopes: list[str]


class LoginDocument(msgspec.Struct, frozen=True, kw_only=True):
    """How to log in here. Public."""

    providers: list[LoginProvider]


class MappingCreate(Body, frozen=True):
    """What a group may do: a role in one project or in all projects of an organisation, or everything as an operator.
    Exactly one of `project_id`, `organisation_id` and `operator` is given; a role with the first two."""

    group: GroupName
    role: str | None = None
    project_id: str | None = None
    organisation_id: str | None = None
    operator: bool = False


class GroupMapping(msgspec.Struct, frozen=True, kw_only=True):
    """What a group of a provider may do."""

    id: str
    provider: str
    group: str
    role: str | None
    project_id: str | None
    organisation_id: str | None
    operator: bool
    created_at: Time


class SessionCreate(Body, frozen=True):
    """A provider's token for this cloud, to be exchanged for a session. A token that carries a nonce is taken only
    together with it. Each token works once."""

    token: Token
    nonce: Annotated[str, Meta(min_length=1, max_length=255)] | None = None


class LoginSession(msgspec.Struct, frozen=True, kw_only=True):
    """A person's login. It ends at `expires_at`, or when it is revoked."""

    id: str
    principal_id: str
    provider: str
    groups: list[str]
    created_at: Time
    expires_at: Time
    revoked_at: Time | None
    last_used_at: Time | None


class SessionCreated(msgspec.Struct, frozen=True, kw_only=True):
    """The only answer that ever shows the session's token. `projects` are those that the person has a role in, the
    first hundred."""

    session: LoginSession
    secret: str
    display_name: str
    operator: bool
    projects: list[Project]

"""Roles and what they allow, and the values that the store returns. Pure.

`ACTIONS` is the one table of allowed actions, and the place where policy refusals come from.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

DEFAULT_ORGANISATION: Final = "org_default"
DEFAULT_PROJECT: Final = "prj_default"
LOCAL_ADMIN: Final = "usr_default"
#: Owner of what the install keeps for itself, such as warm stock. It has no members and is never billed.
PLATFORM_ORGANISATION: Final = "org_platform"
PLATFORM_PROJECT: Final = "prj_platform"


class Role(StrEnum):
    """What a principal is in a project, and at most what a key is."""

    OWNER = "owner"
    ADMIN = "admin"
    DEVELOPER = "developer"
    VIEWER = "viewer"
    BILLING = "billing"


class PrincipalKind(StrEnum):
    """Who can act."""

    USER = "user"
    SERVICE_ACCOUNT = "service_account"


_ANYONE: Final = frozenset(
    {
        "organisations.read",
        "projects.read",
        "members.read",
        "skus.read",
        "quotas.read",
        "egress.read",
        "events.read",
        "usage.read",
        "budgets.read",
    }
)
_VIEWER: Final = _ANYONE | {
    "allocations.read",
    "functions.read",
    "runtimes.read",
    "secrets.read",
    "objects.read",
    "webhooks.read",
}
_DEVELOPER: Final = _VIEWER | {
    "allocations.create",
    "allocations.update",
    "allocations.release",
    "allocations.exec",
    "functions.write",
    "functions.invoke",
    "secrets.write",
    "objects.write",
    "runtimes.write",
    "service_accounts.read",
    "keys.read",
    "keys.write",
}
_ADMIN: Final = _DEVELOPER | {
    "audit.read",
    "billing.read",
    "budgets.write",
    "events.read_organisation",
    "egress.write",
    "members.write",
    "projects.update",
    "service_accounts.write",
    "users.read",
    "webhooks.write",
}

#: The organisation's money, which all its projects share.
_PAYING: Final = frozenset({"billing.read", "billing.write", "budgets.write", "events.read_organisation"})

#: Role → what it allows in its project.
ACTIONS: Final[Mapping[Role, frozenset[str]]] = {
    Role.VIEWER: _VIEWER,
    Role.BILLING: _ANYONE | _PAYING,
    Role.DEVELOPER: _DEVELOPER,
    Role.ADMIN: _ADMIN,
    Role.OWNER: _ADMIN | _PAYING | {"projects.create", "projects.delete"},
}

#: Which of several roles counts. Nobody is given two at once: what a person may do is always what one role allows.
POWER: Final[Mapping[Role, int]] = {
    Role.OWNER: 4,
    Role.ADMIN: 3,
    Role.DEVELOPER: 2,
    Role.VIEWER: 1,
    Role.BILLING: 0,
}

#: What only operators of the platform may do, in any project.
OPERATOR_ACTIONS: Final = frozenset(
    {
        "nodes.read",
        "nodes.write",
        "tasks.read",
        "skus.write",
        "quotas.write",
        "stock.read",
        "stock.write",
        "organisations.write",
        "users.write",
        "providers.read",
        "providers.write",
        "dead_letters.read",
        "dead_letters.write",
        "audit.export",
        "evidence.read",
        "fleet.read",
        "billing.adjust",
    }
)


def actions(role: Role, *, operator: bool) -> frozenset[str]:
    """Everything that a caller may do."""
    return ACTIONS[role] | OPERATOR_ACTIONS if operator else ACTIONS[role]


def strongest(roles: Iterable[Role]) -> Role:
    """The most powerful of some configured roles."""
    return max(roles, key=POWER.__getitem__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Organisation:
    """A customer."""

    id: str
    name: str
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """The scope of everything that people create. `version` counts its changes, members included."""

    id: str
    organisation_id: str
    name: str
    version: int
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A principal's role in a project."""

    principal_id: str
    principal_kind: str
    display_name: str
    role: Role
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A person, known by an identity provider's issuer and subject."""

    id: str
    issuer: str
    subject: str
    display_name: str
    created_at: datetime
    disabled_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAccount:
    """A principal for programs, of one project."""

    id: str
    project_id: str
    name: str
    role: Role
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """An API key, without its secret."""

    id: str
    name: str
    hint: str
    role: Role
    principal_id: str
    project_id: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """A valid key with all that decides who its caller is.

    `project_id`, `organisation_id` and `member_role` are those of the project that was asked for, none where there is
    no such project or membership; without asking it is the key's own.
    """

    key_id: str
    key_role: Role
    key_project_id: str
    key_organisation_id: str
    key_member_role: Role
    principal_id: str
    principal_kind: str
    display_name: str
    operator: bool
    project_id: str | None
    organisation_id: str | None
    member_role: Role | None
    remaining_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """An identity provider. Tokens of its issuer are believed if they were made for one of `accepted`."""

    name: str
    issuer: str
    client_id: str
    client_secret: str
    audiences: list[str]
    scopes: list[str]
    groups_claim: str
    session_s: int
    enabled: bool
    created_at: datetime | None = None

    @property
    def accepted(self) -> frozenset[str]:
        """The audiences that stand for this cloud."""
        return frozenset({self.client_id, *self.audiences})


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMapping:
    """What a group of a provider may do; a role in a project or an organisation, or to be an operator."""

    id: str
    provider: str
    group: str
    role: Role | None
    project_id: str | None
    organisation_id: str | None
    operator: bool
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a verified token says about a person."""

    issuer: str
    subject: str
    display_name: str
    groups: tuple[str, ...]
    nonce: str | None
    #: Seconds since the epoch, by the provider's clock.
    expires: float
    #: Made for our own client, as ID tokens are; not only for one of the further audiences.
    to_client: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """A user as logging in sees them."""

    id: str
    display_name: str
    disabled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A person's login, without its token."""

    id: str
    principal_id: str
    provider: str
    groups: list[str]
    created_at: datetime
    expires_at: datetime
    revoked_at: datetime | None
    last_used_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLogin:
    """A live session with all that decides who its caller is."""

    id: str
    principal_id: str
    display_name: str
    provider: str
    groups: list[str]
    remaining_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A project, and every role that is configured in it for a person and their groups."""

    project_id: str
    organisation_id: str
    name: str
    roles: list[Role]

    @property
    def role(self) -> Role:
        """The one that counts."""
        return strongest(self.roles)

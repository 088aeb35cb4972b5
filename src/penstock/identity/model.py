"""Roles and what they allow, and the values that the store returns. Pure.

`ACTIONS` is the one table of allowed actions, and the place where policy refusals come from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

DEFAULT_ORGANISATION: Final = "org_default"
DEFAULT_PROJECT: Final = "prj_default"
LOCAL_ADMIN: Final = "usr_default"


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
    {"organisations.read", "projects.read", "members.read", "skus.read", "quotas.read", "events.read"}
)
_VIEWER: Final = _ANYONE | {"allocations.read"}
_DEVELOPER: Final = _VIEWER | {
    "allocations.create",
    "allocations.update",
    "allocations.release",
    "allocations.exec",
    "service_accounts.read",
    "keys.read",
    "keys.write",
}
_ADMIN: Final = _DEVELOPER | {
    "audit.read",
    "members.write",
    "projects.update",
    "service_accounts.write",
    "users.read",
}

#: Role → what it allows in its project.
ACTIONS: Final[Mapping[Role, frozenset[str]]] = {
    Role.VIEWER: _VIEWER,
    Role.BILLING: _ANYONE,
    Role.DEVELOPER: _DEVELOPER,
    Role.ADMIN: _ADMIN,
    Role.OWNER: _ADMIN | {"projects.create", "projects.delete"},
}

#: What only operators of the platform may do, in any project.
OPERATOR_ACTIONS: Final = frozenset(
    {
        "nodes.read",
        "nodes.write",
        "tasks.read",
        "skus.write",
        "quotas.write",
        "organisations.write",
        "users.write",
        "dead_letters.read",
        "dead_letters.write",
        "audit.export",
        "evidence.read",
    }
)


def actions(role: Role, *, operator: bool) -> frozenset[str]:
    """Everything that a caller may do."""
    return ACTIONS[role] | OPERATOR_ACTIONS if operator else ACTIONS[role]


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

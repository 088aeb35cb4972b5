"""Organisations, projects, people and keys."""

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.wire.rest.common import Body, Name


class Whoami(msgspec.Struct, frozen=True, kw_only=True):
    """The caller as the server sees it."""

    principal_id: str
    principal_kind: str
    display_name: str
    organisation_id: str
    project_id: str
    role: str
    operator: bool
    key_id: str | None
    #: Where units' ports and commands are reached.
    gateway_url: str


class OrganisationCreate(Body, frozen=True):
    """A new organisation; operators only."""

    name: Name


class Organisation(msgspec.Struct, frozen=True, kw_only=True):
    """A customer: owns projects and pays for them."""

    id: str
    name: str
    created_at: datetime


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
    created_at: datetime


class MemberPut(Body, frozen=True):
    """Give a principal a role in a project: owner, admin, developer, viewer, billing."""

    role: str


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A principal's role in a project."""

    principal_id: str
    principal_kind: str
    display_name: str
    role: str
    created_at: datetime


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
    created_at: datetime


class ServiceAccountCreate(Body, frozen=True):
    """A principal for programs, with a role in the current project that is no higher than the caller's."""

    name: Name
    role: str


class ServiceAccount(msgspec.Struct, frozen=True, kw_only=True):
    """A principal for programs."""

    id: str
    project_id: str
    name: str
    role: str
    created_at: datetime


class KeyCreate(Body, frozen=True):
    """A new API key in the current project. It belongs to the caller, or to a service account of the project, and
    its role is at most the caller's and its owner's."""

    name: Name
    role: str
    service_account_id: str | None = None
    expires_in_s: Annotated[int, Meta(ge=60, le=366 * 24 * 3600)] | None = None


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret."""

    id: str
    name: str
    hint: str
    role: str
    principal_id: str
    project_id: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


class KeyCreated(msgspec.Struct, frozen=True, kw_only=True):
    """The only answer that ever shows the secret."""

    key: Key
    secret: str

"""Expected failures of identity."""

from penstock.kit.errors import Conflict, Denied, Invalid, Unauthenticated, Unavailable


class TokenExpired(Unauthenticated):
    """The bearer token's time is over."""

    code = "token_expired"


class TokenUsed(Unauthenticated):
    """The provider's token was exchanged for a session before."""

    code = "token_used"


class ProviderUnavailable(Unavailable):
    """The identity provider does not tell its keys, so that its tokens cannot be checked now."""

    code = "identity.provider_unavailable"


class NoRole(Denied):
    """A known person without a role anywhere."""

    code = "identity.no_role"


class ProjectRequired(Invalid):
    """The person has several projects and chose none."""

    code = "identity.project_required"


class IssuerTaken(Conflict):
    """One provider per issuer."""

    code = "identity.issuer_taken"


class IssuerFixed(Conflict):
    """A provider keeps its issuer: people are known by it."""

    code = "identity.issuer_fixed"


class MappingExists(Conflict):
    """A group has one role in one place."""

    code = "identity.mapping_exists"


class ScopeExceedsCaller(Denied):
    """Nobody gives more than they have."""

    code = "identity.scope_exceeds_caller"


class KeyBound(Denied):
    """The key works in one project only, and another was asked for."""

    code = "identity.key_bound"


class LastOwner(Conflict):
    """A project keeps at least one owner."""

    code = "identity.last_owner"


class NameTaken(Conflict):
    """The name is in use in the same scope."""

    code = "identity.name_taken"


class ProjectOccupied(Conflict):
    """Something still lives in the project."""

    code = "identity.project_occupied"


class SecretShownBefore(Conflict):
    """The secret was shown to the call that made the key, and cannot be shown to this one."""

    code = "identity.secret_shown_before"

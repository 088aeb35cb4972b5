"""Expected failures of identity."""

from penstock.kit.errors import Conflict, Denied, Unauthenticated


class TokenExpired(Unauthenticated):
    """The bearer token's time is over."""

    code = "token_expired"


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

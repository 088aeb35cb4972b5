"""What every use case asks first: is there such a role, does it exceed the caller, may they touch this project."""

from penstock.identity.errors import ScopeExceedsCaller
from penstock.identity.model import ACTIONS, Role
from penstock.kit.caller import Caller
from penstock.kit.errors import Invalid, missing


def parse_role(text: str) -> Role:
    """The role of this name."""
    try:
        return Role(text)
    except ValueError as error:
        raise Invalid(f"role: must be one of {', '.join(Role)}", field="role") from error


def require_within(caller: Caller, role: Role) -> None:
    """Nobody gives a role that allows more than they may do themselves."""
    if not ACTIONS[role] <= caller.actions:
        raise ScopeExceedsCaller(f"scope exceeds caller: your role ({caller.role}) cannot give {role}", field="role")


def require_project(caller: Caller, project_id: str) -> None:
    """Another project looks absent, except to operators."""
    if project_id != caller.project_id and not caller.operator:
        raise missing("project", project_id)

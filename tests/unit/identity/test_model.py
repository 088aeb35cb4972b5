"""Roles, and who a key makes of its bearer."""

from itertools import pairwise, product

import pytest

from penstock.identity.authenticator import resolve
from penstock.identity.errors import KeyBound
from penstock.identity.model import ACTIONS, OPERATOR_ACTIONS, POWER, Credential, Role, actions, strongest
from penstock.kit.errors import NotFound


def credential(
    key: Role = Role.OWNER,
    member: Role = Role.OWNER,
    *,
    operator: bool = False,
    kind: str = "user",
    asked: tuple[str, str, Role | None] | None = ("prj_a", "org_a", Role.OWNER),
) -> Credential:
    """A key of project A; `asked` is the project that was asked for."""
    project_id, organisation_id, member_role = asked or (None, None, None)
    return Credential(
        key_id="key_1",
        key_role=key,
        key_project_id="prj_a",
        key_organisation_id="org_a",
        key_member_role=member,
        principal_id="usr_1",
        principal_kind=kind,
        display_name="someone",
        operator=operator,
        project_id=project_id,
        organisation_id=organisation_id,
        member_role=member_role,
        remaining_s=None,
    )


def test_each_role_allows_all_that_the_lesser_one_does() -> None:
    for lesser, greater in pairwise((Role.VIEWER, Role.DEVELOPER, Role.ADMIN, Role.OWNER)):
        assert ACTIONS[lesser] < ACTIONS[greater]


def test_whoever_pays_sees_no_work_and_whoever_works_spends_no_money() -> None:
    assert ACTIONS[Role.BILLING] < ACTIONS[Role.OWNER]
    assert not {action for action in ACTIONS[Role.BILLING] if action.startswith(("allocations", "secrets", "objects"))}
    assert [role for role in Role if "billing.write" in ACTIONS[role]] == [Role.OWNER, Role.BILLING]


def test_no_role_allows_what_is_for_operators() -> None:
    for role in Role:
        assert not ACTIONS[role] & OPERATOR_ACTIONS


def test_key_and_membership_limit_each_other() -> None:
    for key, member in product(Role, Role):
        caller = resolve(credential(key, member), None)
        assert caller.actions == ACTIONS[key] & ACTIONS[member]
        assert caller.actions <= ACTIONS[Role(caller.role)]


def test_operator_needs_an_owner_key() -> None:
    assert resolve(credential(operator=True), None).actions == actions(Role.OWNER, operator=True)
    lesser = resolve(credential(Role.ADMIN, operator=True), None)
    assert not lesser.operator
    assert not lesser.actions & OPERATOR_ACTIONS


def test_operators_act_in_any_project_that_exists() -> None:
    caller = resolve(credential(operator=True, asked=("prj_b", "org_b", None)), "prj_b")
    assert (caller.project_id, caller.organisation_id, caller.operator) == ("prj_b", "org_b", True)
    with pytest.raises(NotFound):
        resolve(credential(operator=True, asked=None), "prj_gone")


def test_an_owner_moves_between_their_projects_with_the_role_they_have_there() -> None:
    caller = resolve(credential(asked=("prj_b", "org_a", Role.VIEWER)), "prj_b")
    assert caller.project_id == "prj_b"
    assert caller.actions == ACTIONS[Role.VIEWER]


@pytest.mark.parametrize(
    "bound",
    [
        credential(asked=None),
        credential(asked=("prj_b", "org_a", None)),
        credential(asked=("prj_b", "org_b", Role.OWNER)),
        credential(Role.ADMIN, asked=("prj_b", "org_a", Role.OWNER)),
        credential(Role.OWNER, Role.ADMIN, asked=("prj_b", "org_a", Role.OWNER)),
        credential(kind="service_account", asked=("prj_b", "org_a", Role.OWNER)),
    ],
)
def test_everyone_else_is_bound_to_the_keys_project(bound: Credential) -> None:
    with pytest.raises(KeyBound):
        resolve(bound, "prj_b")


def test_a_more_powerful_role_never_allows_less() -> None:
    for one, other in product(Role, Role):
        if ACTIONS[one] < ACTIONS[other]:
            assert POWER[one] < POWER[other]
    assert len(set(POWER.values())) == len(Role)
    assert strongest([Role.VIEWER, Role.ADMIN, Role.BILLING]) is Role.ADMIN

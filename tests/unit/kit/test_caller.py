"""Who may do what, and how a refusal reads."""

import pytest

from penstock.kit.caller import Caller
from penstock.kit.errors import Denied


def caller(*actions: str, operator: bool = False) -> Caller:
    return Caller(
        principal_id="usr_a",
        principal_kind="user",
        display_name="Ada",
        organisation_id="org_a",
        project_id="prj_a",
        role="owner",
        actions=frozenset(actions),
        operator=operator,
        operators_only=frozenset({"nodes.write"}),
    )


def test_what_is_allowed_passes() -> None:
    caller("keys.write", "nodes.write").require("nodes.write")


@pytest.mark.parametrize(
    ("who", "action", "says"),
    [
        (caller(), "keys.write", "your role (owner) does not allow keys.write"),
        (caller(), "nodes.write", "operators only: no role in an organisation allows nodes.write"),
        (caller(operator=True), "nodes.write", "your role (owner) does not allow nodes.write"),
    ],
)
def test_a_refusal_says_who_could(who: Caller, action: str, says: str) -> None:
    with pytest.raises(Denied) as refused:
        who.require(action)
    assert refused.value.detail == says

"""What nodes are told when they join."""

import pytest

from penstock.fleet.enrolment import Addresses
from penstock.kit.errors import Invalid


def test_nodes_are_never_told_our_own_password() -> None:
    assert Addresses(api_url="", link_url="", nats_url="tls://nats.example:4222").nats_url
    with pytest.raises(Invalid, match="carries credentials") as refused:
        Addresses(api_url="", link_url="", nats_url="nats://penstock:hidden@nats.example:4222")
    assert (refused.value.field, "hidden" in str(refused.value)) == ("nodes_nats_url", False)

"""The node's lifecycle is one table: everything in it can happen, and nothing else."""

from itertools import product

import pytest

from penstock.fleet.model import ANSWERING, FACTS, FINAL, MOVES, RETURNS, WISHES, NodeEvent, NodeState

#: Written out by hand, so that a changed table has to be meant.
EXPECTED = """
pending      enrol            enrolled
pending      retire           retired
enrolled     recover          enrolled
enrolled     return_ready     ready
enrolled     revoke           lost
enrolled     retire           retired
ready        recover          ready
ready        cordon           cordoned
ready        drain            draining
ready        fall_silent      unreachable
ready        revoke           lost
ready        retire           retired
cordoned     recover          cordoned
cordoned     uncordon         ready
cordoned     drain            draining
cordoned     fall_silent      unreachable
cordoned     revoke           lost
cordoned     retire           retired
draining     recover          draining
draining     uncordon         ready
draining     cordon           cordoned
draining     fall_silent      unreachable
draining     revoke           lost
draining     retire           retired
unreachable  recover          unreachable
unreachable  return_ready     ready
unreachable  return_cordoned  cordoned
unreachable  return_draining  draining
unreachable  cordon           unreachable
unreachable  uncordon         unreachable
unreachable  drain            unreachable
unreachable  give_up          lost
unreachable  revoke           lost
unreachable  retire           retired
lost         recover          lost
lost         return_ready     ready
lost         return_cordoned  cordoned
lost         return_draining  draining
lost         cordon           lost
lost         uncordon         lost
lost         drain            lost
lost         revoke           lost
lost         retire           retired
"""


@pytest.mark.parametrize(("state", "event"), list(product(NodeState, NodeEvent)))
def test_every_pair_of_state_and_event_is_as_written_down(state: NodeState, event: NodeEvent) -> None:
    table = {(line.split()[0], line.split()[1]): line.split()[2] for line in EXPECTED.strip().splitlines()}
    assert MOVES.get((state, event)) == table.get((state.value, event.value))


def test_every_state_can_be_reached_and_only_retired_is_final() -> None:
    reached = {NodeState.PENDING}
    while more := {target for (source, _), target in MOVES.items() if source in reached} - reached:
        reached |= more
    assert reached == set(NodeState)
    assert {NodeState.RETIRED} == FINAL


def test_every_event_leaves_a_fact() -> None:
    assert set(FACTS) == set(NodeEvent)


def test_a_silent_node_returns_to_what_was_last_wished() -> None:
    for wish in WISHES.values():
        for silent in (NodeState.UNREACHABLE, NodeState.LOST):
            assert MOVES[silent, RETURNS[wish]] is wish
    assert set(WISHES.values()) == ANSWERING

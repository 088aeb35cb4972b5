"""The table of moves is the whole lifecycle."""

from itertools import product

import pytest

from penstock.compute.model import (
    AT_REST,
    FACTS,
    FINAL,
    INITIAL,
    MOVES,
    Deadlines,
    Event,
    State,
    after,
    diagram,
    fact,
)

#: DESIGN §4, word for word: from, on, to.
DESIGN = {
    ("requested", "placed"): "provisioning",
    ("requested", "deadline"): "failed",
    ("provisioning", "ready"): "active",
    ("provisioning", "step_failed"): "failed",
    ("provisioning", "deadline"): "failed",
    ("requested", "release"): "releasing",
    ("provisioning", "release"): "releasing",
    ("active", "release"): "releasing",
    ("active", "handed_over"): "released",
    ("releasing", "proved"): "released",
    ("releasing", "exhausted"): "release_failed",
    ("releasing", "deadline"): "release_failed",
    ("release_failed", "retry"): "releasing",
}


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_a_pair_moves_as_designed_or_not_at_all(state: State, event: Event) -> None:
    assert after(state, event) == DESIGN.get((state.value, event.value))


def test_every_state_can_be_reached() -> None:
    reached = {INITIAL}
    while more := {target for (source, _), target in MOVES.items() if source in reached} - reached:
        reached |= more
    assert reached == set(State)


def test_every_state_that_is_not_final_leads_to_an_end() -> None:
    ending = set(FINAL)
    while more := {source for (source, _), target in MOVES.items() if target in ending} - ending:
        ending |= more
    assert ending == set(State)


def test_only_states_at_rest_have_no_deadline() -> None:
    deadlines = Deadlines()
    assert {state for state in State if deadlines.of(state) is None} == AT_REST
    assert {State.ACTIVE, State.RELEASE_FAILED, State.RELEASED, State.FAILED} == AT_REST
    assert {State.RELEASED, State.FAILED} == FINAL


def test_every_state_with_a_deadline_has_a_move_for_it() -> None:
    assert {state for state, event in MOVES if event is Event.DEADLINE} == set(State) - AT_REST


def test_every_event_has_a_fact() -> None:
    assert set(FACTS) == set(Event)
    assert fact(State.RELEASING, Event.DEADLINE) == "provisioning.release_failed"
    assert fact(State.PROVISIONING, Event.DEADLINE) == "provisioning.failed"


def test_diagram_shows_every_move() -> None:
    text = diagram()
    assert all(f"{source} --> {target}: {event}" in text for (source, event), target in MOVES.items())

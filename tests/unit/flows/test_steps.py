"""The saga's table."""

from penstock.flows.steps import ACTIONS, DOES, FAIL, LOOK, PREPARE_RUNTIME, PROVISION, UNDO, UNDO_START


def test_undo_runs_in_reverse() -> None:
    assert UNDO == (UNDO_START, FAIL)
    assert DOES[0] is LOOK


def test_every_step_that_touches_a_node_can_be_undone_but_the_one_whose_effect_is_kept() -> None:
    undone = [step for step in PROVISION if not step.do.local and step.do is not PREPARE_RUNTIME]
    assert all(step.undo is not None and not step.undo.local for step in undone)


def test_action_names_are_unique_and_tries_bounded() -> None:
    assert len({action.name for action in ACTIONS}) == len(ACTIONS)
    assert all(1 <= action.attempts_max <= 5 for action in ACTIONS)

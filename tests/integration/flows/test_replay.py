"""Sagas that began under an earlier version of the code go on under this one: their histories replay."""

from pathlib import Path

import pytest
from temporalio import workflow
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner

from integration.flows.scenarios import SCENARIOS
from penstock.flows.allocation import WORKFLOW, AllocationSaga

FILES = sorted((Path(__file__).parents[2] / "data" / "histories").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
async def test_a_kept_history_replays(file: Path) -> None:
    history = WorkflowHistory.from_json(file.stem, file.read_text())
    await Replayer(workflows=[AllocationSaga], workflow_runner=UnsandboxedWorkflowRunner()).replay_workflow(history)


def test_every_scenario_has_a_history() -> None:
    assert {play.__name__ for play in SCENARIOS} <= {file.stem for file in FILES}


@workflow.defn(name=WORKFLOW)
class Other:
    """A saga that is not ours."""

    @workflow.run
    async def run(self, allocation_id: str) -> str:
        """Only sleep."""
        await workflow.sleep(1)
        return allocation_id


async def test_a_saga_that_does_something_else_does_not_replay() -> None:
    history = WorkflowHistory.from_json("x", FILES[0].read_text())
    replayer = Replayer(workflows=[Other], workflow_runner=UnsandboxedWorkflowRunner())
    with pytest.raises(workflow.NondeterminismError):
        await replayer.replay_workflow(history)

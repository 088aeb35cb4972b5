"""GPUs that are not well: quarantine, and return after proof.

A GPU that its node reports as failed, or that an operator takes out, gets no work until a probe on the node has passed
and the node reports it healthy. A failed one is probed by itself when it has been reported healthy for a settled time;
an operator's only when an operator asks. A GPU here is a whole one: its shares go and come with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.fleet import metrics
from penstock.fleet.errors import GpuNotQuarantined
from penstock.fleet.model import Cause, Config, Quarantine, Reading, Slot, TaskOutcome
from penstock.fleet.store import gpus as gpu_rows
from penstock.fleet.store import slots as slot_rows
from penstock.fleet.tasks import Tasks
from penstock.kit import audit
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Reader, Tx
from penstock.kit.errors import missing
from penstock.kit.ids import new_id
from penstock.kit.telemetry import correlated, logger
from penstock.wire import subjects
from penstock.wire.link import GpuReport
from penstock.wire.tasks import GPU_PROBE, GpuProbe, GpuProbed

_log = logger(__name__)
_ACTOR: Final = audit.system("fleet")
_BATCH: Final = 100
#: All shares of a GPU are overwritten, each within two minutes.
_PROBE_S: Final = 900.0
#: After a probe has passed, the node's next heartbeat says that the GPU is well.
_REPORT_S: Final = 60.0
_DETAIL_CHARS_MAX: Final = 255


async def take_reports(tx: Tx, reports: Sequence[tuple[str, GpuReport]]) -> None:
    """(node, report): quarantine what failed, and note which quarantined GPUs are well. The slots have the reports
    already."""
    failed = {(node_id, report.uuid): report.detail for node_id, report in reports if report.failed}
    if failed:
        wholes = await gpu_rows.wholes(tx, list(failed))
        await _quarantine_failed(
            tx, {(node_id, wholes[node_id, uuid]): failed[node_id, uuid] for node_id, uuid in wholes}
        )
    await gpu_rows.mark_well(tx, list({node_id for node_id, _ in reports}))


async def _quarantine_failed(tx: Tx, failed: Mapping[tuple[str, str], str]) -> None:
    gpus = sorted(failed)
    await slot_rows.lock_gpus(tx, gpus)
    details = [failed[gpu] or "its node reports a failure" for gpu in gpus]
    taken = await gpu_rows.quarantine(
        tx, gpus, Cause.FAILED, details, [f"the GPU failed: {detail}" for detail in details]
    )
    for one in taken:
        _log.warning("gpu_quarantined", node_id=one.node_id, gpu=one.gpu_uuid, detail=one.detail)
        await audit.record(tx, _ACTOR, "gpus.quarantine", one.id, detail=_described(one))
    await slot_rows.follow_quarantines(tx, sorted({node_id for node_id, _ in gpus}))


async def quarantine(tx: Tx, caller: Caller, *, node_id: str, slot_id: str, reason: str, drain: bool) -> Slot:
    """Take the GPU of a slot out of service; with `drain`, what runs on it has to leave."""
    slot = await _find(tx, caller, node_id, slot_id)
    gpu = (node_id, slot.whole_uuid)
    await slot_rows.lock_gpus(tx, [gpu])
    detail = reason or "taken out of service by an operator"
    leave = f"the GPU is taken out of service: {detail}" if drain else ""
    for one in await gpu_rows.quarantine(tx, [gpu], Cause.OPERATOR, [detail], [leave]):
        await audit.record(tx, caller.actor, "gpus.quarantine", one.id, detail=_described(one) | {"drain": drain})
    await slot_rows.follow_quarantines(tx, [node_id])
    await gpu_rows.mark_well(tx, [node_id])
    return await _find(tx, caller, node_id, slot_id)


async def ask_return(tx: Tx, caller: Caller, *, node_id: str, slot_id: str) -> Slot:
    """Have the GPU of a slot probed; it returns when that passes."""
    slot = await _find(tx, caller, node_id, slot_id)
    found = await gpu_rows.lock(tx, node_id, slot.whole_uuid)
    if found is None:
        raise GpuNotQuarantined(f"the GPU is not in quarantine; its slot is {slot.health}")
    await gpu_rows.ask_return(tx, found.id)
    await audit.record(tx, caller.actor, "gpus.ask_return", found.id, detail=_described(found))
    return slot


async def _find(tx: Tx, caller: Caller, node_id: str, slot_id: str) -> Slot:
    caller.require("nodes.write")
    slot = next((slot for slot in await slot_rows.of_nodes(tx, [node_id]) if slot.id == slot_id), None)
    if slot is None:
        raise missing("slot", f"{slot_id} on node {node_id}")
    return slot


def _described(one: Quarantine) -> dict[str, object]:
    return {"node_id": one.node_id, "gpu_uuid": one.gpu_uuid, "cause": one.cause.value, "detail": one.detail}


async def to_leave(conn: Reader) -> dict[str, str]:
    """Slot → why what runs there has to leave."""
    return await gpu_rows.to_leave(conn)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What is known of the GPUs of some nodes."""

    quarantines: Mapping[tuple[str, str], Quarantine]
    readings: Mapping[tuple[str, str], Reading]


async def conditions(conn: Reader, node_ids: Sequence[str]) -> Conditions:
    """Quarantines and readings, by (node, whole GPU)."""
    return Conditions(await gpu_rows.open_of(conn, node_ids), await gpu_rows.readings_of(conn, node_ids))


@dataclass(frozen=True, slots=True)
class Prover:
    """Has quarantined GPUs probed when it is time, and returns those that pass. Any number may run at once."""

    db: Database
    tasks: Tasks
    config: Config

    async def sweep(self) -> None:
        """One step for each GPU that is due."""
        with correlated(new_id("cor")):
            async with self.db.transaction() as tx:
                for one in await gpu_rows.due(tx, settle_s=self.config.gpu_settle_s, limit=_BATCH):
                    await self._advance(tx, one)
        async with self.db.read() as conn:
            counts = await gpu_rows.count_open(conn)
        for cause in Cause:
            metrics.GPUS_QUARANTINED.labels(cause.value).set(counts.get(cause.value, 0))

    async def _advance(self, tx: Tx, one: Quarantine) -> None:
        if one.probe_task_id is None:
            await self._ask(tx, one)
            return
        outcome = await self.tasks.outcome(tx, one.probe_task_id)
        if outcome is None:
            return
        problem = _problem(outcome)
        if not problem and one.well_since is None:
            if await gpu_rows.probed_for(tx, one.id) < _PROBE_S + _REPORT_S:
                return
            problem = "the probe passed, but its node does not report the GPU healthy"
        if problem:
            _log.warning("gpu_probe_failed", node_id=one.node_id, gpu=one.gpu_uuid, detail=problem)
            await gpu_rows.note_failure(tx, one.id, problem[:_DETAIL_CHARS_MAX])
        else:
            await self._return(tx, one)

    async def _ask(self, tx: Tx, one: Quarantine) -> None:
        task_id = await self.tasks.dispatch(
            tx,
            node_id=one.node_id,
            type=GPU_PROBE,
            allocation_id=None,
            fence=0,
            params=GpuProbe(gpu_uuid=one.gpu_uuid),
            dedupe_key=f"probe/{one.id}/{new_id('prb')}",
            expires_s=_PROBE_S,
        )
        await gpu_rows.note_probe(tx, one.id, task_id)

    async def _return(self, tx: Tx, one: Quarantine) -> None:
        await slot_rows.lock_gpus(tx, [(one.node_id, one.gpu_uuid)])
        ended = await gpu_rows.end(tx, one.id)
        await slot_rows.follow_quarantines(tx, [one.node_id])
        await audit.record(tx, _ACTOR, "gpus.return", one.id, detail=_described(ended))
        tx.hint(subjects.CAPACITY)
        _log.info("gpu_returned", node_id=one.node_id, gpu=one.gpu_uuid)


def _problem(outcome: TaskOutcome) -> str:
    """Why the probe did not pass; nothing when it did."""
    if not outcome.succeeded:
        return f"the probe did not run: {outcome.detail or outcome.error_code or outcome.state}"
    found = outcome.decode(GpuProbed)
    return "" if found.passed else (found.detail or "the probe did not pass")

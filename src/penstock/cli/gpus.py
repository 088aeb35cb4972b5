"""The GPUs of a node: how they are, and out of service and back."""

import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli import completing, names
from penstock.cli.errors import NOT_FOUND, TIMEOUT, CliError
from penstock.cli.output import EXTRA, ID, NEEDED, Column
from penstock.cli.progress import progress
from penstock.cli.session import Session, command, group
from penstock.cli.text import size
from penstock.wire.rest import GpuReadings, NodeGpu

if TYPE_CHECKING:
    from penstock.sdk.client import Client

app = group("gpu", "A node's GPUs: how they are, out of service and back.")

_LOOK_S: Final = 1.0
_WAIT_S: Final = 900.0


def _degrees(readings: GpuReadings) -> str | None:
    return None if readings.temperature_c is None else f"{readings.temperature_c} °C"


def _watts(readings: GpuReadings) -> str | None:
    return None if readings.power_w is None else f"{readings.power_w:.0f} W"


def _load(readings: GpuReadings) -> str | None:
    return None if readings.utilization_percent is None else f"{readings.utilization_percent} %"


def _memory(readings: GpuReadings) -> str | None:
    return None if readings.memory_used_bytes is None else size(readings.memory_used_bytes)


def _errors(readings: GpuReadings) -> str | None:
    """Corrected and uncorrected memory errors, and faults."""
    known = [value for value in (readings.ecc_corrected, readings.ecc_uncorrected) if value is not None]
    return "/".join(map(str, [*known, readings.faults])) if known else str(readings.faults)


READING_COLUMNS: Final[list[Column[NodeGpu]]] = [
    Column("temperature", lambda gpu: gpu.readings and _degrees(gpu.readings)),
    Column("power", lambda gpu: gpu.readings and _watts(gpu.readings)),
    Column("load", lambda gpu: gpu.readings and _load(gpu.readings)),
    Column("memory used", lambda gpu: gpu.readings and _memory(gpu.readings)),
    Column("errors", lambda gpu: gpu.readings and _errors(gpu.readings)),
]
COLUMNS: Final[list[Column[NodeGpu]]] = [
    Column("gpu", lambda gpu: gpu.index),
    Column("uuid", lambda gpu: gpu.uuid),
    Column("slot", lambda gpu: gpu.slot_id, rank=ID),
    Column("model", lambda gpu: gpu.model + (" (simulated)" if gpu.simulated else "")),
    Column("health", lambda gpu: gpu.health, rank=NEEDED),
    Column("detail", lambda gpu: gpu.health_detail, rank=EXTRA),
    Column("since", lambda gpu: gpu.quarantine and gpu.quarantine.since),
    Column("well since", lambda gpu: gpu.quarantine and gpu.quarantine.well_since),
    Column("last probe", lambda gpu: gpu.quarantine and gpu.quarantine.probe_detail, rank=EXTRA),
    *READING_COLUMNS,
    Column("allocation", lambda gpu: gpu.allocation_id),
]

NodeName = Annotated[
    str, typer.Argument(metavar="NODE", help="The node's name or id (nod_…).", autocompletion=completing.nodes)
]
Gpu = Annotated[str, typer.Argument(help="Its number on the node, its UUID, or its slot (slt_…).")]


@command(app, "list", example="penstock node gpu list rack1-host7")
def list_(session: Session, node: NodeName) -> None:
    """List a node's GPUs with their health and what their sensors show."""
    with session.client() as client:
        session.output.items(client.nodes.get(names.node(client, node)).gpus, COLUMNS)


@command(app, "quarantine", example="penstock node gpu quarantine rack1-host7 3 --reason 'fan is loud'")
def quarantine(
    session: Session,
    node: NodeName,
    gpu: Gpu,
    reason: Annotated[str, typer.Option(help="Why; shown on the GPU and in the audit log.")] = "",
    drain: Annotated[bool, typer.Option("--drain", help="Release what runs on it.")] = False,
) -> None:
    """Take a GPU out of service until you ask for its return."""
    with session.client() as client:
        node_id = names.node(client, node)
        slot_id = _slot(client, node_id, gpu)
        session.output.item(client.nodes.quarantine_gpu(node_id, slot_id, reason=reason, drain=drain), COLUMNS)


@command(app, "return", example="penstock node gpu return rack1-host7 3")
def return_(
    session: Session,
    node: NodeName,
    gpu: Gpu,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the probe's end.")] = True,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="How long to wait at most.")] = _WAIT_S,
) -> None:
    """Have a quarantined GPU probed: it returns to service if it passes."""
    with session.client() as client:
        node_id = names.node(client, node)
        slot_id = _slot(client, node_id, gpu)
        found = client.nodes.return_gpu(node_id, slot_id)
        if wait:
            found = _follow(client, node_id, slot_id, found, timeout_s=timeout)
    session.output.item(found, COLUMNS)
    if wait and found.quarantine is not None:
        if found.quarantine.probing:
            raise CliError(f"the probe of GPU {found.uuid} goes on", code="wait_timeout", exit_code=TIMEOUT)
        why = found.quarantine.probe_detail
        raise CliError(f"GPU {found.uuid} stays in quarantine: {why}", code="gpu_not_returned")


def _follow(client: "Client", node_id: str, slot_id: str, found: NodeGpu, *, timeout_s: float) -> NodeGpu:
    """The GPU once its probe has ended, or as it is when the time is over."""
    until = time.monotonic() + timeout_s
    with progress(f"probing GPU {found.uuid}"):
        while found.quarantine is not None and found.quarantine.probing and time.monotonic() < until:
            time.sleep(_LOOK_S)
            found = next((gpu for gpu in client.nodes.get(node_id).gpus if gpu.slot_id == slot_id), found)
    return found


def _slot(client: "Client", node_id: str, gpu: str) -> str:
    """The slot that is meant. A number or the UUID of a GPU with shares means any of them: they go together."""
    if gpu.startswith("slt_"):
        return gpu
    known = client.nodes.get(node_id).gpus
    for one in known:
        if gpu in (one.uuid, str(one.index)):
            return one.slot_id
    listing = f"see `penstock node gpu list {node_id}`"
    raise CliError(f"the node has no GPU {gpu}", field="gpu", exit_code=NOT_FOUND, next_step=listing)

"""What can be rented, and its price."""

import re
from typing import Annotated, Final

import typer

from penstock.cli.output import Column
from penstock.cli.session import Session, command, group
from penstock.cli.text import Money, size
from penstock.wire.rest import Sku, SkuPut

_PRICE: Final = re.compile(r"\$?(?P<whole>[0-9]{1,6})(?:\.(?P<rest>[0-9]{1,6}))?")

app = group("sku", "Offers: what can be rented, and its price.")


def share(sku: Sku) -> str:
    """How much of a GPU one of its places is; empty for all of it."""
    if sku.share == "mps":
        at_least = f" >= {size(sku.share_memory_bytes_min)}" if sku.share_memory_bytes_min else ""
        return f"mps{at_least}"
    return sku.mig_profile


COLUMNS: list[Column[Sku]] = [
    Column("name", lambda sku: sku.name),
    Column("gpu", lambda sku: sku.gpu_model),
    Column("share", share),
    Column("counts", lambda sku: ",".join(map(str, sku.gpu_counts))),
    Column("per gpu hour", lambda sku: Money(sku.price_microusd_per_gpu_hour)),
    Column("memory per gpu", lambda sku: size(sku.memory_bytes_per_gpu)),
    Column("cpus per gpu", lambda sku: f"{sku.cpus_per_gpu:g}"),
    Column("free", lambda sku: sku.gpus_free),
    Column("enabled", lambda sku: sku.enabled),
    Column("description", lambda sku: sku.description),
]


@command(app, "list", example="penstock sku list -o csv")
def list_(session: Session) -> None:
    """List offers."""
    with session.client() as client:
        session.output.items(client.skus.list(), COLUMNS)


@command(app, "show", example="penstock sku show g1.1")
def show(session: Session, name: Annotated[str, typer.Argument(help="The offer's name.")]) -> None:
    """Show one offer."""
    with session.client() as client:
        session.output.item(client.skus.get(name), COLUMNS)


@command(
    app,
    "set",
    example="penstock sku set h100.8 --gpu-model 'NVIDIA H100' --count 1 --count 8 --price 3.49 --memory 64 --cpus 16",
)
def set_(
    session: Session,
    name: Annotated[str, typer.Argument(help="The offer's name.")],
    gpu_model: Annotated[str, typer.Option(help="The model's name; * takes any.")],
    price: Annotated[str, typer.Option(metavar="DOLLARS", help="Per GPU and hour, up to six decimals.")],
    memory: Annotated[float, typer.Option(metavar="GIB", help="Main memory for each GPU.", min=0.0625)],
    cpus: Annotated[float, typer.Option(help="Processors for each GPU.")],
    count: Annotated[list[int] | None, typer.Option(help="A number of GPUs that may be asked for; repeat.")] = None,
    description: Annotated[str, typer.Option(help="For people who choose.")] = "",
    processes: Annotated[int, typer.Option(help="How many processes a unit may have.")] = 4096,
    scratch: Annotated[float, typer.Option(metavar="GIB", help="Scratch space.")] = 10.0,
    mig: Annotated[str, typer.Option(metavar="PROFILE", help="Shares by MIG of this profile, such as 1g.10gb.")] = "",
    mps: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="Shares by MPS with at least so much GPU memory.", min=0),
    ] = None,
    enabled: Annotated[bool, typer.Option("--enabled/--disabled", help="Whether it can be rented.")] = True,
) -> None:
    """Define or change an offer; operators only. Running allocations keep their price.

    With --mig or --mps the offer is of shares of GPUs: counts, price, memory and CPUs are then those of one share.
    """
    if mig and mps is not None:
        raise typer.BadParameter("a share is by MIG or by MPS, not both", param_hint="--mps")
    sku = SkuPut(
        description=description,
        gpu_model=gpu_model,
        gpu_counts=count or [1],
        price_microusd_per_gpu_hour=microusd(price),
        memory_bytes_per_gpu=int(memory * (1 << 30)),
        cpus_per_gpu=cpus,
        processes_max=processes,
        scratch_bytes=int(scratch * (1 << 30)),
        share="mig" if mig else "gpu" if mps is None else "mps",
        mig_profile=mig,
        share_memory_bytes_min=int((mps or 0) * (1 << 30)),
        enabled=enabled,
    )
    with session.client() as client:
        session.output.item(client.skus.put(name, sku), COLUMNS)


def microusd(text: str) -> int:
    """A price in dollars as an exact number of micro-dollars."""
    match = _PRICE.fullmatch(text)
    if match is None:
        raise typer.BadParameter("a price looks like 3.49, with up to six decimals", param_hint="--price")
    return int(match["whole"]) * 1_000_000 + int((match["rest"] or "").ljust(6, "0"))

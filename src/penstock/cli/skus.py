"""What can be rented, and its price."""

import re
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli import completing
from penstock.cli.errors import NOT_FOUND, CliError
from penstock.cli.many import say_each
from penstock.cli.output import EXTRA, ID, NEEDED, Column
from penstock.cli.session import Session, command, group
from penstock.cli.text import Money, size
from penstock.wire.rest import Sku, SkuPut, SkuUpdate

if TYPE_CHECKING:
    from penstock.sdk.client import Client

_PRICE: Final = re.compile(r"\$?(?P<whole>[0-9]{1,6})(?:\.(?P<rest>[0-9]{1,6}))?")

#: What a new offer cannot do without, and the options that say it.
_NEEDED: Final = {
    "gpu_model": "--gpu-model",
    "price_microusd_per_gpu_hour": "--price",
    "memory_bytes_per_gpu": "--memory",
    "cpus_per_gpu": "--cpus",
}

SkuName = Annotated[str, typer.Argument(help="The offer's name.", autocompletion=completing.skus)]

app = group("sku", "Offers: what can be rented, and its price.")


def share(sku: Sku) -> str:
    """How much of a GPU one of its places is; empty for all of it."""
    if sku.share == "mps":
        at_least = f" >= {size(sku.share_memory_bytes_min)}" if sku.share_memory_bytes_min else ""
        return f"mps{at_least}"
    return sku.mig_profile


COLUMNS: list[Column[Sku]] = [
    Column("name", lambda sku: sku.name, rank=ID),
    Column("gpu", lambda sku: sku.gpu_model),
    Column("share", share),
    Column("counts", lambda sku: ",".join(map(str, sku.gpu_counts))),
    Column("per gpu hour", lambda sku: Money(sku.price_microusd_per_gpu_hour)),
    Column("memory per gpu", lambda sku: size(sku.memory_bytes_per_gpu)),
    Column("cpus per gpu", lambda sku: f"{sku.cpus_per_gpu:g}"),
    Column("free", lambda sku: sku.gpus_free, rank=NEEDED),
    Column("enabled", lambda sku: sku.enabled),
    Column("description", lambda sku: sku.description, rank=EXTRA),
]


@command(app, "list", example="penstock sku list -o csv")
def list_(session: Session) -> None:
    """List offers."""
    with session.client() as client:
        session.output.items(client.skus.list(), COLUMNS)


@command(app, "show", example="penstock sku show g1.1")
def show(session: Session, name: SkuName) -> None:
    """Show one offer."""
    with session.client() as client:
        session.output.item(client.skus.get(name), COLUMNS)


@command(
    app,
    "set",
    example="penstock sku set h100.8 --gpu-model 'NVIDIA H100' --count 1 --count 8 --price 3.49 --memory 64 --cpus 16\n"
    "  penstock sku set h100.8 --price 2.99",
)
def set_(
    session: Session,
    name: SkuName,
    gpu_model: Annotated[str | None, typer.Option(help="The model's name; * takes any.")] = None,
    price: Annotated[str | None, typer.Option(metavar="DOLLARS", help="Per GPU and hour, up to six decimals.")] = None,
    memory: Annotated[float | None, typer.Option(metavar="GIB", help="Main memory for each GPU.", min=0.0625)] = None,
    cpus: Annotated[float | None, typer.Option(help="Processors for each GPU.")] = None,
    count: Annotated[
        list[int] | None, typer.Option(help="A number of GPUs that may be asked for; repeat. A new offer has 1.")
    ] = None,
    description: Annotated[str | None, typer.Option(help="For people who choose.")] = None,
    processes: Annotated[
        int | None, typer.Option(help="How many processes a unit may have; 4096 in a new offer.")
    ] = None,
    scratch: Annotated[float | None, typer.Option(metavar="GIB", help="Scratch space; 10 in a new offer.")] = None,
    mig: Annotated[
        str | None, typer.Option(metavar="PROFILE", help="Shares by MIG of this profile, such as 1g.10gb.")
    ] = None,
    mps: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="Shares by MPS with at least so much GPU memory.", min=0),
    ] = None,
    enabled: Annotated[
        bool | None,
        typer.Option("--enabled/--disabled", help="Whether it can be rented; so is a new offer.", show_default=False),
    ] = None,
) -> None:
    """Define an offer, or change what is given of it; operators only. Running allocations keep their price.

    With --mig or --mps the offer is of shares of GPUs: counts, price, memory and CPUs are then those of one share.
    """
    if mig and mps is not None:
        raise typer.BadParameter("a share is by MIG or by MPS, not both", param_hint="--mps")
    change = SkuUpdate(
        description=description,
        gpu_model=gpu_model,
        gpu_counts=count or None,
        price_microusd_per_gpu_hour=None if price is None else microusd(price),
        memory_bytes_per_gpu=_bytes(memory),
        cpus_per_gpu=cpus,
        processes_max=processes,
        scratch_bytes=_bytes(scratch),
        enabled=enabled,
        **_share(mig, mps),
    )
    with session.client() as client:
        session.output.item(_set(client, name, change), COLUMNS)


def _share(mig: str | None, mps: float | None) -> dict[str, Any]:
    """What makes an offer one of shares; nothing where that is not said."""
    if mig is not None:
        return {"share": "mig" if mig else "gpu", "mig_profile": mig, "share_memory_bytes_min": 0}
    if mps is not None:
        return {"share": "mps", "mig_profile": "", "share_memory_bytes_min": _bytes(mps)}
    return {}


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * (1 << 30))


def _set(client: "Client", name: str, change: SkuUpdate) -> Sku:
    """Change the offer, or define it where there is none of this name."""
    import msgspec

    from penstock.sdk.errors import NotFound

    given: dict[str, Any] = {
        field: value for field, value in msgspec.structs.asdict(change).items() if value is not None
    }
    if not given:
        raise CliError(f"say what of {name} to change, such as --price 2.99", field="options")
    try:
        return client.skus.update(name, change)
    except NotFound:
        if absent := [option for field, option in _NEEDED.items() if field not in given]:
            message = f"there is no SKU {name} yet; a new one needs {', '.join(absent)}"
            raise CliError(message, code="not_found", exit_code=NOT_FOUND) from None
        defaults: dict[str, Any] = {"description": "", "gpu_counts": [1]}
        return client.skus.put(name, SkuPut(**defaults | given))


@command(app, "delete", example="penstock sku delete h100.8")
def delete(
    session: Session,
    skus: Annotated[
        list[str], typer.Argument(metavar="SKU…", help="The offers' names.", autocompletion=completing.skus)
    ],
) -> None:
    """Delete offers; operators only. Refused while an allocation, a function or warm stock needs one."""
    with session.client() as client:

        def delete(name: str) -> str:
            client.skus.delete(name)
            return f"deleted SKU {name}"

        say_each(session, skus, delete)


def microusd(text: str) -> int:
    """A price in dollars as an exact number of micro-dollars."""
    match = _PRICE.fullmatch(text)
    if match is None:
        raise typer.BadParameter("a price looks like 3.49, with up to six decimals", param_hint="--price")
    return int(match["whole"]) * 1_000_000 + int((match["rest"] or "").ljust(6, "0"))

"""Warm stock: units that are kept ready, so that an allocation starts at once."""

from typing import Annotated, Final

import typer

from penstock.cli import completing
from penstock.cli.output import EXTRA, ID, Column, notice
from penstock.cli.session import Session, command, group
from penstock.wire.rest import StockFloor

app = group("stock", "Warm stock: units kept ready, so that an allocation starts at once.")

COLUMNS: Final[list[Column[StockFloor]]] = [
    Column("sku", lambda it: it.sku, rank=ID),
    Column("gpus", lambda it: it.gpus),
    Column("image", lambda it: it.image),
    Column("floor", lambda it: it.floor),
    Column("ready", lambda it: it.ready),
    Column("starting", lambda it: it.starting),
    Column("handed over (1 h)", lambda it: it.handed_over),
    Column("reason", lambda it: it.reason, rank=EXTRA),
]

Sku = Annotated[str, typer.Argument(help="The offer that the units are for.", autocompletion=completing.skus)]
Gpus = Annotated[int, typer.Option(help="GPUs of each unit.")]
Image = Annotated[str, typer.Option(help="Image of each unit.")]


@command(app, "list", example="penstock stock list -o csv")
def list_(session: Session) -> None:
    """List the floors, what is ready, and why it is short; operators only."""
    with session.client() as client:
        session.output.items(client.stock.list(), COLUMNS)


@command(app, "set", example="penstock stock set g1.1 --gpus 1 --image python:3 --floor 4")
def set_(
    session: Session,
    sku: Sku,
    floor: Annotated[int, typer.Option(help="So many units are kept ready.", min=0, max=1000)],
    gpus: Gpus = 1,
    image: Image = "python:3",
) -> None:
    """Set how many units are kept ready; operators only."""
    with session.client() as client:
        session.output.item(client.stock.put(sku, floor=floor, gpus=gpus, image=image), COLUMNS)


@command(app, "remove", example="penstock stock remove g1.1 --gpus 1 --image python:3")
def remove(session: Session, sku: Sku, gpus: Gpus = 1, image: Image = "python:3") -> None:
    """Keep no stock of this kind any more; operators only."""
    with session.client() as client:
        client.stock.delete(sku, gpus=gpus, image=image)
    notice(f"no stock of {sku} with {gpus} GPUs and {image} is kept any more")

"""Renting GPUs and giving them back."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli import completing, execution, names
from penstock.cli.errors import EXHAUSTED, FAILED, TIMEOUT, YOUR_CODE, CliError
from penstock.cli.interrupts import explained
from penstock.cli.many import each
from penstock.cli.output import EXTRA, ID, NEEDED, Column, Format
from penstock.cli.progress import progress
from penstock.cli.session import Session, command, group
from penstock.cli.text import Money
from penstock.sdk.compute import AT_REST, new_allocation_id
from penstock.wire.rest import Allocation, TimelineEntry

if TYPE_CHECKING:
    from penstock.sdk.client import Client

app = group("alloc", "Rent GPUs and use them.")

STATES: Final = ("requested", "provisioning", "active", "releasing", "release_failed", "released", "failed")
RELEASED: Final = frozenset({"released", "release_failed", "failed"})
_WAIT_S: Final = 900.0


def _purpose(item: Allocation) -> str:
    """Workers say of which function: nobody made them by hand."""
    function = item.labels.get("function") if item.purpose == "function_worker" else None
    return f"{item.purpose} {function}" if function else item.purpose


COLUMNS: list[Column[Allocation]] = [
    Column("id", lambda item: item.id, rank=ID),
    Column("name", lambda item: item.name, rank=NEEDED),
    Column("purpose", _purpose),
    Column("state", lambda item: item.state, rank=NEEDED),
    Column("sku", lambda item: item.sku),
    Column("gpus", lambda item: f"{item.gpus}{' (simulated)' if item.simulated else ''}"),
    Column("per hour", lambda item: Money(item.price_microusd_per_hour)),
    Column("created", lambda item: item.created_at),
    Column("reason", lambda item: item.reason, rank=EXTRA),
]
DETAIL_COLUMNS: list[Column[Allocation]] = [
    *COLUMNS,
    Column("image", lambda item: item.image),
    Column("runtime", lambda item: item.runtime[:12]),
    Column("labels", lambda item: item.labels),
    Column("ports", lambda item: item.ports),
    Column("node", lambda item: item.node_id),
    Column("gpu uuids", lambda item: item.gpu_uuids),
    Column("active", lambda item: item.active_at),
    Column("ended", lambda item: item.ended_at),
    Column("deadline", lambda item: item.deadline_at),
]
TIMELINE_COLUMNS: list[Column[TimelineEntry]] = [
    Column("at", lambda entry: entry.at),
    Column("state", lambda entry: entry.state, rank=NEEDED),
    Column("reason", lambda entry: entry.reason, rank=EXTRA),
]

AllocationName = Annotated[
    str,
    typer.Argument(
        metavar="ALLOCATION", help="The allocation's name or id (alc_…).", autocompletion=completing.allocations
    ),
]
AllocationNames = Annotated[
    list[str],
    typer.Argument(
        metavar="ALLOCATION…", help="The allocations' names or ids (alc_…).", autocompletion=completing.allocations
    ),
]
SkuName = Annotated[str, typer.Option(help="The offer; see `penstock sku list`.", autocompletion=completing.skus)]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until it is done, and show how it moves.")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", min=0, help="How long --wait waits at most.")]
Label = Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="A label; repeat.")]


@command(app, "create", example="penstock alloc create --sku g1.1 --gpus 2 --label team=vision --wait")
def create(
    session: Session,
    sku: SkuName,
    argv: Annotated[list[str] | None, typer.Argument(help="The unit's own command, after --.")] = None,
    gpus: Annotated[int, typer.Option(help="How many GPUs, all on one node.")] = 1,
    name: Annotated[str | None, typer.Option(help="What to call it.")] = None,
    label: Label = None,
    env: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="A variable inside; repeat.")] = None,
    image: Annotated[str, typer.Option(help="What it runs on.")] = "python:3",
    port: Annotated[list[int] | None, typer.Option(help="Show this port's URL; repeat.")] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=ENV]", help="Give it this secret as /run/secrets/NAME, and as a variable; repeat."),
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(help="An environment; see `penstock runtime list`.", autocompletion=completing.runtimes),
    ] = None,
    wait_capacity: Annotated[
        int, typer.Option(metavar="SECONDS", help="Wait this long for free GPUs instead of being refused.")
    ] = 0,
    wait: Wait = False,
    timeout: Timeout = _WAIT_S,
) -> None:
    """Rent GPUs."""
    chosen = new_allocation_id()
    made: Allocation | None = None
    with session.client() as client, explained(lambda: _left_behind(session, chosen, made)):
        made = client.allocations.create(
            sku,
            gpus=gpus,
            name=name,
            image=image,
            labels=pairs(label or [], option="--label"),
            env=pairs(env or [], option="--env"),
            command=argv or [],
            ports=port or [],
            secrets=_secrets(secret or []),
            runtime=runtime,
            wait_s=wait_capacity,
            allocation_id=chosen,
        )
        if wait:
            made = follow(session, client, made, until=AT_REST, timeout_s=timeout)
    show_one(session, made)
    if wait and made.state != "active":
        code = _exit_code(made, own_command=bool(argv))
        raise CliError(f"{made.id} is {made.state}: {made.reason}", code="not_active", exit_code=code)


def _exit_code(ended: Allocation, *, own_command: bool) -> int:
    """The exit code of an allocation that did not become active."""
    if ended.state == "failed" and ended.node_id is None:
        return EXHAUSTED
    exited = ended.state == "released" and ended.reason.startswith(("the unit exited", "the unit was killed"))
    return YOUR_CODE if own_command and exited else FAILED


def _left_behind(session: Session, allocation_id: str, made: Allocation | None) -> str:
    """What to do about an allocation that nobody waits for any more."""
    release = session.line("alloc", "release", allocation_id)
    if made is None:
        return f"{allocation_id} may have been made, and is charged then; this ends it: {release}"
    return f"{allocation_id} goes on and is charged; this ends it: {release}"


@command(app, "list", example="penstock alloc list --state active --label team=vision")
def list_(
    session: Session,
    everything: Annotated[bool, typer.Option("-a", "--all", help="Also those that have ended.")] = False,
    state: Annotated[
        str | None, typer.Option(help="Only in this state.", autocompletion=completing.words(*STATES))
    ] = None,
    sku: Annotated[str | None, typer.Option(help="Only of this offer.", autocompletion=completing.skus)] = None,
    name: Annotated[str | None, typer.Option(help="Only of this name.")] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Only with this label; repeat.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="How many at most.")] = None,
) -> None:
    """List the allocations that have not ended, newest first; with --all or --state, also others."""
    labels = pairs(label or [], option="--label")
    ended = None if everything or state else False
    with session.client() as client:
        listed = client.allocations.list(state=state, sku=sku, name=name, labels=labels, ended=ended, limit=limit)
        session.output.items(listed, COLUMNS)


@command(app, "show", example="penstock alloc show train")
def show(session: Session, allocation: AllocationName) -> None:
    """Show an allocation with its addresses, its timeline and the reason for its state."""
    with session.client() as client:
        show_one(session, client.allocations.get(names.allocation(client, allocation)))


@command(app, "update", example="penstock alloc update train --name trainer --label team=vision")
def update(
    session: Session,
    allocation: AllocationName,
    name: Annotated[str | None, typer.Option(help="A new name.")] = None,
    label: Label = None,
) -> None:
    """Change the name, or replace all labels."""
    if name is None and label is None:
        raise CliError("give --name, --label or both")
    labels = None if label is None else pairs(label, option="--label")
    with session.client() as client:
        found = names.allocation(client, allocation)
        show_one(session, client.allocations.update(found, name=name, labels=labels))


@command(app, "release", example="penstock alloc release train --wait")
def release(
    session: Session,
    allocations: AllocationNames,
    reason: Annotated[str, typer.Option(help="Why; shown on the allocation.")] = "",
    wait: Wait = False,
    timeout: Timeout = _WAIT_S,
) -> None:
    """Give the GPUs back, in whatever state the allocations are."""
    with session.client() as client:
        done = each(
            session, allocations, lambda text: client.allocations.release(names.allocation(client, text), reason=reason)
        )
        if wait:
            released = [follow(session, client, it, until=RELEASED, timeout_s=timeout) for it in done.values]
        else:
            released = done.values
    if done.many:
        session.output.items(released, COLUMNS)
    else:
        show_one(session, released[0])
    if failed := [it for it in released if wait and it.state == "release_failed"]:
        said = "; ".join(f"{it.id}: {it.reason}" for it in failed)
        raise CliError(said, code="release_failed")
    done.end()


command(
    app,
    "exec",
    example="penstock alloc exec train -- python3 -c 'print(1)'",
    passes_on=True,
)(execution.execute)


def follow(
    session: Session, client: "Client", allocation: Allocation, *, until: Collection[str], timeout_s: float
) -> Allocation:
    """Wait and show every change of state."""
    from penstock.sdk.errors import WaitTimeout

    shown = [_moved(allocation)]

    def moved(item: Allocation) -> None:
        if _moved(item) != shown[-1]:
            shown.append(_moved(item))
            report(shown[-1])

    try:
        with progress(shown[0]) as report:
            return client.allocations.wait(allocation.id, until=until, timeout_s=timeout_s, on_change=moved)
    except WaitTimeout as error:
        see = session.line("alloc", "show", allocation.id)
        raise CliError(error.message, code=error.code, exit_code=TIMEOUT, next_step=f"see `{see}`") from None


def _moved(allocation: Allocation) -> str:
    return f"{allocation.id} {allocation.state}" + (f": {allocation.reason}" if allocation.reason else "")


def show_one(session: Session, allocation: Allocation) -> None:
    """One allocation, for people with its addresses and timeline."""
    output = session.output
    output.item(allocation, DETAIL_COLUMNS)
    if output.format is not Format.TABLE:
        return
    if allocation.access_urls:
        output.line("")
        output.rows(["access", "url"], list(allocation.access_urls.items()), ranks=[ID, ID])
    if allocation.timeline:
        output.line("")
        output.items(allocation.timeline, TIMELINE_COLUMNS)


def _secrets(texts: Sequence[str]) -> dict[str, str]:
    """`NAME` or `NAME=ENV` options as names and variables."""
    found: dict[str, str] = {}
    for text in texts:
        name, separator, variable = text.partition("=")
        if not name or name in found or (separator and not variable):
            problem = "is given twice" if name in found else "must look like NAME or NAME=ENV"
            raise typer.BadParameter(f"{text!r} {problem}", param_hint="--secret")
        found[name] = variable
    return found


def pairs(texts: Sequence[str], *, option: str) -> dict[str, str]:
    """`KEY=VALUE` options as a mapping."""
    found: dict[str, str] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key or key in found:
            problem = "is given twice" if key in found else "must look like KEY=VALUE"
            raise typer.BadParameter(f"{text!r} {problem}", param_hint=option)
        found[key] = value
    return found

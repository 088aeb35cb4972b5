"""Deploys files of functions: for good, or while one works on them."""

import signal
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli.calling import print_line
from penstock.cli.errors import TIMEOUT, CliError
from penstock.cli.interrupts import SIGNALS
from penstock.cli.output import notice
from penstock.cli.progress import Report, progress
from penstock.cli.session import Session
from penstock.cli.text import dollars
from penstock.wire.rest import Function, OutputLine

if TYPE_CHECKING:
    from penstock.sdk.client import Client
    from penstock.sdk.deploying import Source

_WAIT_S: Final = 300.0
_POLL_S: Final = 0.25
_WATCH_S: Final = 0.5

File = Annotated[Path, typer.Argument(help="The Python file with the app.")]


def deploy(
    session: Session,
    file: File,
    name: Annotated[str, typer.Option(help="Only this function of the app.")] = "",
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait until the new version serves.")] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="How long to wait at most.")] = _WAIT_S,
    upgrade: Annotated[bool, typer.Option("--upgrade", help="Resolve packages by name anew.")] = False,
) -> None:
    """Deploy the functions of a file. Calls go to the old version until the new one has a worker."""
    from penstock.cli.functions import COLUMNS
    from penstock.sdk.deploying import deploy

    source = _read(file)
    notes: list[str] = []
    try:
        with session.client() as client, progress(f"reading {file}") as report:
            done = deploy(client, source, only=name, upgrade=upgrade, report=report, note=notes.append)
            if not no_wait:
                done = [_serving(client, each, time.monotonic() + timeout, report) for each in done]
            notes += _costs(client, done)
    finally:
        # After the spinner, which would draw over them.
        for each in notes:
            notice(each)
    session.output.items(done, COLUMNS)


def _costs(client: "Client", done: Sequence[Function]) -> list[str]:
    """What a worker of each function costs while nobody calls."""
    prices = {sku.name: sku.price_microusd_per_gpu_hour for sku in client.skus.list()}
    return [idle_cost(each, prices.get(each.definition.sku)) for each in done]


def idle_cost(function: Function, price_microusd: int | None) -> str:
    """How long an idle worker is kept, and what that costs."""
    wanted = function.definition
    price = "the price of its SKU" if price_microusd is None else f"{dollars(price_microusd * wanted.gpus)}/h"
    kept = f"a worker is kept {wanted.idle_s:g} s after its last call and costs {price} meanwhile"
    always = f"; {wanted.workers_min} of them always (workers_min)" if wanted.workers_min else ""
    return f"{function.name}: {kept}; idle_s=… changes it{always}"


def _read(file: Path) -> "Source":
    """The file's own failure is shown as Python shows it, without our frames."""
    from penstock.sdk.deploying import read
    from penstock.sdk.errors import SdkError

    try:
        return read(file)
    except SdkError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the file raises
        own = str(file.resolve().parent)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(own)]
        where = f"line {frames[-1].lineno} of {Path(frames[-1].filename).name}: " if frames else ""
        message = f"cannot import {file}: {where}{type(error).__name__}: {error}{_remedy(error)}"
        raise CliError(message, code="import_failed", field="file") from None


def _remedy(error: Exception) -> str:
    """What helps when the file needs a package that only its unit has."""
    from penstock.sdk.functions import imports

    if isinstance(error, ImportError):
        return ". A package that only the unit has is imported in a block `with app.imports():` (after app = …)"
    if isinstance(error, NameError) and imports.missing:
        packages = ", ".join(dict.fromkeys(imports.missing))
        return (
            f". Names of {packages}, which is not installed here, exist only in the unit: use them inside functions;"
            " for annotations, begin the file with `from __future__ import annotations`"
        )
    return ""


def _serving(client: "Client", function: Function, until: float, report: Report) -> Function:
    """The function when its current version gets the calls."""
    while function.serving_version != function.current_version:
        if time.monotonic() > until:
            first = function.waiting_for.partition("\n")[0]
            why = f": {first}; see penstock fn show {function.name}" if first else ""
            message = f"version {function.current_version} of {function.name} does not serve yet{why}"
            raise CliError(message, code="wait_timeout", exit_code=TIMEOUT)
        why = function.waiting_for.partition("\n")[0] or "starting"
        report(f"{function.name} version {function.current_version}: {why}")
        time.sleep(_POLL_S)
        function = client.functions.get(function.name)
    report(f"{function.name} version {function.current_version} serves")
    return function


def serve(session: Session, file: File) -> None:
    """Deploy under names that end in -dev, again whenever a file changes, and show what is printed. Ctrl-C deletes
    them."""
    from penstock.sdk.deploying import stamps

    source = _read(file)
    seen = stamps(source.root)
    for ending in SIGNALS:
        # A closed terminal must not leave functions behind that hold GPUs.
        signal.signal(ending, signal.default_int_handler)
    served: dict[str, bool] = {}
    with session.client() as client:
        try:
            _put(session, client, source, served)
            _watch(session, client, file, source.root, seen, served)
        except KeyboardInterrupt:
            notice("")
        finally:
            _delete(client, served)


def _delete(client: "Client", names: Iterable[str]) -> None:
    from penstock.sdk.errors import NotFound, SdkError

    for name in names:
        try:
            client.functions.delete(name)
            notice(f"deleted {name}")
        except NotFound:
            continue
        except SdkError as error:
            notice(f"{name} is still there: {error.message}")


def _put(session: Session, client: "Client", source: "Source", served: dict[str, bool]) -> None:
    """Deploy all, and show the logs of those that are new. Names are noted before they are there, so that nothing is
    left of what goes wrong half-way; with them, whether their logs are shown."""
    from penstock.sdk.deploying import deploy
    from penstock.sdk.functions.app import DEVELOPMENT

    for _, made in source.functions():
        served.setdefault(made.name + DEVELOPMENT, False)
    for each in deploy(client, source, suffix=DEVELOPMENT, report=notice, note=notice):
        notice(f"{each.name} version {each.current_version}: {each.url}")
    _show_logs(session, [name for name, shown in served.items() if not shown])
    served.update(dict.fromkeys(served, True))


def _watch(session: Session, client: "Client", file: Path, root: Path, seen: object, served: dict[str, bool]) -> None:
    """Deploy again whenever the files are not those that were deployed last, also if they changed meanwhile."""
    from penstock.sdk.deploying import stamps
    from penstock.sdk.errors import SdkError

    while True:
        time.sleep(_WATCH_S)
        now = stamps(root)
        if now == seen:
            continue
        seen = now
        try:
            _put(session, client, _read(file), served)
        except (CliError, SdkError) as error:
            notice(f"not deployed: {error.message}")


def _show_logs(session: Session, names: Sequence[str]) -> None:
    for name in names:
        threading.Thread(target=_follow, args=(session, name), name=f"logs-{name}", daemon=True).start()


def _follow(session: Session, name: str) -> None:
    from penstock.sdk.errors import SdkError

    try:
        with session.client() as client:
            for line in client.functions.follow(name):
                if isinstance(line, OutputLine):
                    print_line(session, line)
    except SdkError as error:
        notice(f"no more logs of {name}: {error.message}")

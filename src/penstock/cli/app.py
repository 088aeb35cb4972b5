"""The command tree and how a run of it ends."""

import errno
import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import typer

from penstock.cli.completion import VARIABLE, complete
from penstock.cli.errors import FAILED, INTERRUPTED, OK, OUTPUT_CLOSED, TERMINATED, CliError
from penstock.cli.failing import Failure, failure, tell
from penstock.cli.interrupts import Terminated
from penstock.cli.lazy import Entry, module
from penstock.cli.session import Session, root

USING: Final = "Use the cloud"
ACCESS: Final = "Log in and manage access"
OPERATING: Final = "Operate a cloud"

#: Everything that can be said after `penstock`, in the order of the help. The entry point adds the processes.
ENTRIES: Final[dict[str, Entry]] = {
    "alloc": Entry("Rent GPUs and use them.", module("penstock.cli.allocations"), panel=USING),
    "fn": Entry("Functions: deploy, call and look after them.", module("penstock.cli.functions"), panel=USING),
    "secret": Entry("Values for units that nobody can read back.", module("penstock.cli.secrets"), panel=USING),
    "object": Entry("Files of a project that outlive units.", module("penstock.cli.objects"), panel=USING),
    "runtime": Entry(
        "Environments: an image with the packages of a lock file.", module("penstock.cli.runtimes"), panel=USING
    ),
    "egress": Entry("Where units may connect to.", module("penstock.cli.egress"), panel=USING),
    "billing": Entry("Balance, costs, statements and invoices.", module("penstock.cli.billing"), panel=USING),
    "webhook": Entry("Addresses that events are sent to.", module("penstock.cli.webhooks"), panel=USING),
    "events": Entry("Show what happened, or follow it.", module("penstock.cli.feeds"), inside=True, panel=USING),
    "login": Entry(
        "Log in with your identity provider, or with a key.", module("penstock.cli.login"), inside=True, panel=ACCESS
    ),
    "logout": Entry("End a login, or forget a stored key.", module("penstock.cli.login"), inside=True, panel=ACCESS),
    "auth": Entry("Log in and out.", module("penstock.cli.login"), hidden=True),
    "whoami": Entry("Show who the server takes you for.", module("penstock.cli.login"), inside=True, panel=ACCESS),
    "project": Entry(
        "Projects: the scope of everything that you create.", module("penstock.cli.projects"), panel=ACCESS
    ),
    "member": Entry("Who has which role in a project.", module("penstock.cli.projects", "members"), panel=ACCESS),
    "key": Entry("Make, list and revoke API keys.", module("penstock.cli.keys"), panel=ACCESS),
    "service-account": Entry(
        "Principals for programs.", module("penstock.cli.principals", "service_accounts"), panel=ACCESS
    ),
    "session": Entry("Logins of people.", module("penstock.cli.providers", "sessions"), panel=ACCESS),
    "config": Entry("Show the configuration.", module("penstock.cli.configuration"), panel=ACCESS),
    "completion": Entry(
        "Complete commands and values with the tab key.", module("penstock.cli.completion"), panel=ACCESS
    ),
    "sku": Entry("Offers: what can be rented, and its price.", module("penstock.cli.skus"), panel=OPERATING),
    "stock": Entry("Warm stock: units kept ready.", module("penstock.cli.stock"), panel=OPERATING),
    "fleet": Entry("The fleet at a glance, and what is stuck.", module("penstock.cli.fleet"), panel=OPERATING),
    "node": Entry("GPU hosts: enrol them and look after them.", module("penstock.cli.nodes"), panel=OPERATING),
    "user": Entry("People.", module("penstock.cli.principals", "users"), panel=OPERATING),
    "org": Entry(
        "Organisations: customers that own projects.",
        module("penstock.cli.principals", "organisations"),
        panel=OPERATING,
    ),
    "idp": Entry("Identity providers and what their groups may do.", module("penstock.cli.providers"), panel=OPERATING),
    "audit": Entry(
        "Who did what, and the proof that the log was not changed.", module("penstock.cli.audit"), panel=OPERATING
    ),
    "evidence": Entry(
        "Gather everything that belongs to one request.", module("penstock.cli.evidence"), inside=True, panel=OPERATING
    ),
    "dead-letters": Entry(
        "Events that the broker refused for good.", module("penstock.cli.feeds", "dead_letters"), panel=OPERATING
    ),
}

app = root("Rent GPUs, run work on them, and look after the cloud that they form.", ENTRIES)


def run(app: typer.Typer, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one command line and say how it ended."""
    _prepare_streams()
    try:
        try:
            return _invoke(app, argv, Session(environ))
        finally:
            sys.stdout.flush()
    except Terminated:
        return TERMINATED
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        # The interpreter must not try to write the rest again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if error.errno == errno.EPIPE:
            return OUTPUT_CLOSED
        sys.stderr.write(f"error: cannot write the output: {error.strerror} (code=output)\n")
        return FAILED


def _prepare_streams() -> None:
    """Output that was closed from the start goes nowhere, and no character is too much for it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open until the exit
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _invoke(app: typer.Typer, argv: Sequence[str], session: Session) -> int:
    from penstock.sdk.errors import SdkError

    tree = typer.main.get_command(app)
    if session.environ.get(VARIABLE):
        return complete(tree, session, session.environ)
    session.argv = argv
    try:
        with tree.make_context("penstock", list(argv), obj=session) as context:
            tree.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    except typer.Abort:
        return INTERRUPTED
    except typer.TyperException as error:
        message = " ".join(error.format_message().split())
        return tell(session, argv, Failure(exit_code=FAILED, code="usage", message=message))
    except (CliError, SdkError) as error:
        return tell(session, argv, failure(error, session))
    return OK

"""The command tree and how a run of it ends."""

import errno
import io
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import typer

from penstock.cli.completion import VARIABLE, complete
from penstock.cli.errors import INTERRUPTED, LOGIN_AGAIN, OK, OUTPUT_CLOSED, USAGE, CliError, exit_code
from penstock.cli.lazy import Entry, module
from penstock.cli.output import Format
from penstock.cli.session import Session, root
from penstock.cli.text import clean, clean_json

#: Everything that can be said after `penstock`, in the order of the help. The entry point adds the processes.
ENTRIES: Final[dict[str, Entry]] = {
    "alloc": Entry("Rent GPUs and use them.", module("penstock.cli.allocations")),
    "fn": Entry("Functions: deploy, call and look after them.", module("penstock.cli.functions")),
    "secret": Entry("Values for units that nobody can read back.", module("penstock.cli.secrets")),
    "object": Entry("Files of a project that outlive units.", module("penstock.cli.objects")),
    "sku": Entry("Offers: what can be rented, and its price.", module("penstock.cli.skus")),
    "stock": Entry("Warm stock: units kept ready.", module("penstock.cli.stock")),
    "runtime": Entry("Environments: an image with the packages of a lock file.", module("penstock.cli.runtimes")),
    "billing": Entry("Balance, costs, statements and invoices.", module("penstock.cli.billing")),
    "webhook": Entry("Addresses that events are sent to.", module("penstock.cli.webhooks")),
    "events": Entry("Show what happened, or follow it.", module("penstock.cli.feeds"), inside=True),
    "whoami": Entry("Show who the server takes you for.", module("penstock.cli.login"), inside=True),
    "login": Entry("Log in with your identity provider, or with a key.", module("penstock.cli.login"), inside=True),
    "logout": Entry("End a login, or forget a stored key.", module("penstock.cli.login"), inside=True),
    "auth": Entry("Log in and out.", module("penstock.cli.login"), hidden=True),
    "project": Entry("Projects: the scope of everything that you create.", module("penstock.cli.projects")),
    "member": Entry("Who has which role in a project.", module("penstock.cli.projects", "members")),
    "egress": Entry("Where units may connect to.", module("penstock.cli.egress")),
    "key": Entry("Make, list and revoke API keys.", module("penstock.cli.keys")),
    "service-account": Entry("Principals for programs.", module("penstock.cli.principals", "service_accounts")),
    "user": Entry("People.", module("penstock.cli.principals", "users")),
    "org": Entry("Organisations: customers that own projects.", module("penstock.cli.principals", "organisations")),
    "fleet": Entry("The fleet at a glance, and what is stuck.", module("penstock.cli.fleet")),
    "idp": Entry("Identity providers and what their groups may do.", module("penstock.cli.providers")),
    "session": Entry("Logins of people.", module("penstock.cli.providers", "sessions")),
    "node": Entry("GPU hosts: enrol them and look after them.", module("penstock.cli.nodes")),
    "audit": Entry("Who did what, and the proof that the log was not changed.", module("penstock.cli.audit")),
    "evidence": Entry("Gather everything that belongs to one request.", module("penstock.cli.evidence"), inside=True),
    "dead-letters": Entry("Events that the broker refused for good.", module("penstock.cli.feeds", "dead_letters")),
    "config": Entry("Show the configuration.", module("penstock.cli.configuration")),
    "completion": Entry("Complete commands with the tab key.", module("penstock.cli.completion")),
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
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        # The interpreter must not try to write the rest again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if error.errno == errno.EPIPE:
            return OUTPUT_CLOSED
        sys.stderr.write(f"error: cannot write the output: {error.strerror} (code=output)\n")
        return USAGE


def _prepare_streams() -> None:
    """Output that was closed from the start goes nowhere, and no character is too much for it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open until the exit
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _invoke(app: typer.Typer, argv: Sequence[str], session: Session) -> int:
    from penstock.sdk.errors import SdkError, Unauthenticated

    tree = typer.main.get_command(app)
    if session.environ.get(VARIABLE):
        return complete(tree, session, session.environ)
    try:
        with tree.make_context("penstock", list(argv), obj=session) as context:
            tree.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    except typer.Abort:
        return INTERRUPTED
    except typer.TyperException as error:
        return _fail(session, argv, USAGE, "usage", " ".join(error.format_message().split()))
    except CliError as error:
        return _fail(session, argv, error.exit_code, error.code, error.message, field=error.field)
    except SdkError as error:
        hint = f"; {LOGIN_AGAIN}" if isinstance(error, Unauthenticated) else ""
        return _fail(
            session,
            argv,
            exit_code(error),
            error.code,
            error.message + hint,
            field=error.field,
            correlation_id=error.correlation_id,
        )
    return OK


def _fail(
    session: Session,
    argv: Sequence[str],
    status: int,
    code: str,
    message: str,
    *,
    field: str | None = None,
    correlation_id: str | None = None,
) -> int:
    details = {"code": code, "field": field, "correlation_id": correlation_id}
    known = {name: value for name, value in details.items() if value}
    if session.output.format is Format.JSON or _asks_for_json(argv):
        import json

        text = clean_json(json.dumps({"error": {"message": message, **known}}, ensure_ascii=False))
    else:
        text = clean(f"error: {message} ({', '.join(f'{name}={value}' for name, value in known.items())})")
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
    return status


def _asks_for_json(argv: Sequence[str]) -> bool:
    """For failures before the options were read."""
    pairs = itertools.pairwise(argv)
    return any(pair in {("-o", "json"), ("--output", "json")} for pair in pairs) or "--output=json" in argv

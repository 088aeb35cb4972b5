"""Where the project's units may connect to."""

from typing import Annotated

import typer

from penstock.cli.errors import NOT_FOUND, CliError
from penstock.cli.output import Format, notice
from penstock.cli.session import Session, command, group
from penstock.wire.rest import EgressRules

app = group("egress", "Where units may connect to. Without rules they have no way out.")

Rules = Annotated[
    list[str],
    typer.Argument(
        help="Such as pypi.org, '*.example.com:443', '203.0.114.0/24:8000-8100', or '*' for every public host."
    ),
]


@command(app, "show", example="penstock egress show")
def show(session: Session) -> None:
    """Show the project's rules."""
    with session.client() as client:
        _print(session, client.egress.get())


@command(app, "set", example="penstock egress set pypi.org files.pythonhosted.org '*.example.com:443'")
def set_(session: Session, rules: Rules) -> None:
    """Replace all rules, for allocations that are made from now on."""
    with session.client() as client:
        _print(session, client.egress.put(rules))


@command(app, "allow", example="penstock egress allow huggingface.co '*.huggingface.co'")
def allow(session: Session, rules: Rules) -> None:
    """Add rules."""
    with session.client() as client:
        kept = client.egress.get().rules
        _print(session, client.egress.put([*kept, *(rule for rule in rules if rule not in kept)]))


@command(app, "deny", example="penstock egress deny pypi.org")
def deny(session: Session, rules: Rules) -> None:
    """Take rules away, as they are written in `show`."""
    with session.client() as client:
        kept = client.egress.get().rules
        if absent := [rule for rule in rules if rule not in kept]:
            known = ", ".join(kept) or "none"
            raise CliError(f"there is no rule {absent[0]}; there are: {known}", field="rules", exit_code=NOT_FOUND)
        _print(session, client.egress.put([rule for rule in kept if rule not in rules]))


def _print(session: Session, found: EgressRules) -> None:
    if session.output.format is Format.JSON:
        session.output.json(found)
        return
    session.output.rows(["rule"], [[rule] for rule in found.rules])
    if not found.rules and session.output.format is Format.TABLE:
        notice("units of this project have no way out")

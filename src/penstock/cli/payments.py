"""Paying in, paying back, and what the payment provider told."""

from typing import Annotated, Final

import typer

from penstock.cli.errors import CliError
from penstock.cli.output import EXTRA, ID, NEEDED, Column, Format, notice
from penstock.cli.progress import progress
from penstock.cli.session import Session, command, group
from penstock.cli.text import Money, microusd
from penstock.wire.rest import Payment, ProviderEvent, Refund

_WAIT_S: Final = 900.0
_CENT_MICROUSD: Final = 10_000
_TOPUP_MIN_MICROUSD: Final = 1_000_000

PAYMENT_COLUMNS: list[Column[Payment]] = [
    Column("id", lambda payment: payment.id, rank=ID),
    Column("state", lambda payment: payment.state, rank=NEEDED),
    Column("amount", lambda payment: Money(payment.amount_microusd)),
    Column("refunded", lambda payment: Money(payment.refunded_microusd)),
    Column("provider", lambda payment: payment.provider),
    Column("created", lambda payment: payment.created_at),
    Column("completed", lambda payment: payment.completed_at),
    Column("reason", lambda payment: payment.reason, rank=EXTRA),
]
#: For a terminal: the rest is on the payment's own page.
PAYMENT_TABLE: list[Column[Payment]] = [
    Column("id", lambda payment: payment.id, rank=ID),
    Column("state", lambda payment: payment.state, rank=NEEDED),
    Column("amount", lambda payment: Money(payment.amount_microusd)),
    Column("refunded", lambda payment: Money(payment.refunded_microusd)),
    Column("created", lambda payment: payment.created_at),
    Column("reason", lambda payment: payment.reason, rank=EXTRA),
]
PAYMENT_DETAILS: list[Column[Payment]] = [
    *PAYMENT_COLUMNS,
    Column("created by", lambda payment: payment.created_by),
    Column("pay at", lambda payment: payment.checkout_url if payment.state == "open" else ""),
]
REFUND_COLUMNS: list[Column[Refund]] = [
    Column("id", lambda refund: refund.id, rank=ID),
    Column("payment", lambda refund: refund.payment_id),
    Column("state", lambda refund: refund.state, rank=NEEDED),
    Column("amount", lambda refund: Money(refund.amount_microusd)),
    Column("reason", lambda refund: refund.reason, rank=EXTRA),
    Column("failure", lambda refund: refund.failure, rank=EXTRA),
    Column("created", lambda refund: refund.created_at),
    Column("completed", lambda refund: refund.completed_at),
]
EVENT_COLUMNS: list[Column[ProviderEvent]] = [
    Column("id", lambda event: event.event_id, rank=ID),
    Column("type", lambda event: event.type),
    Column("state", lambda event: event.state, rank=NEEDED),
    Column("payment", lambda event: event.payment_id),
    Column("received", lambda event: event.received_at),
    Column("reason", lambda event: event.reason, rank=EXTRA),
]
EVENT_DETAILS: list[Column[ProviderEvent]] = [
    *EVENT_COLUMNS,
    Column("provider", lambda event: event.provider),
    Column("attempts", lambda event: event.attempts),
    Column("handled", lambda event: event.handled_at),
    Column("body", lambda event: event.body),
]

Amount = Annotated[str, typer.Argument(metavar="AMOUNT", help="In dollars, such as 20 or 20.50.")]
PaymentId = Annotated[str, typer.Argument(metavar="PAYMENT", help="The payment's id (pay_…).")]
EventId = Annotated[str, typer.Argument(metavar="EVENT", help="The event's id at the provider (evt_…).")]
Why = Annotated[str, typer.Option("--reason", help="Why; kept in the audit log.")]

events = group("provider-events", "What the payment provider told, and what waits for a decision; operators only.")


def register(app: typer.Typer) -> None:
    """Add these commands to `penstock billing`."""
    command(app, "topup", example="penstock billing topup 20 --wait")(topup)
    command(app, "payments", example="penstock billing payments")(payments)
    command(app, "payment", example="penstock billing payment pay_01k9z3v5x7y9a1b3c5d7e9f1g3")(payment)
    command(
        app, "refund", example="penstock billing refund pay_01k9z3v5x7y9a1b3c5d7e9f1g3 5.50 --reason 'paid by mistake'"
    )(refund)
    command(app, "retry-refund", example="penstock billing retry-refund rfd_01k9z3v5x7y9a1b3c5d7e9f1g3")(retry_refund)
    app.add_typer(events)


def cents(text: str, *, at_least: int = _CENT_MICROUSD) -> int:
    """Dollars as a person types them, in whole cents: payments know nothing smaller."""
    return microusd(text, field="amount", at_least=at_least, places=2)


def topup(
    session: Session,
    amount: Amount,
    pay: Annotated[bool, typer.Option("--pay", help="Pay at once; with the local provider only.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the balance is credited.")] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="How long --wait waits at most.")] = _WAIT_S,
) -> None:
    """Pay in, and show where. The balance is credited when the provider confirms."""
    asked = cents(amount, at_least=_TOPUP_MIN_MICROUSD)
    with session.client() as client:
        made = client.payments.topup(asked)
        if pay:
            client.payments.pay(made)
        elif wait:
            notice(f"pay at {made.checkout_url}")
        if wait:
            with progress(f"{made.id} {made.state}") as report:
                made = client.payments.wait(
                    made.id, timeout_s=timeout, on_change=lambda item: report(f"{item.id} {item.state}")
                )
    session.output.item(made, PAYMENT_DETAILS)
    if wait and made.state != "succeeded":
        raise CliError(f"{made.id} is {made.state}: {made.reason}", code="not_paid")


def payments(
    session: Session, limit: Annotated[int | None, typer.Option(min=1, help="How many at most.")] = None
) -> None:
    """List payments, newest first."""
    with session.client() as client:
        columns = PAYMENT_TABLE if session.output.format is Format.TABLE else PAYMENT_COLUMNS
        session.output.items(client.payments.list(limit=limit), columns)


def payment(session: Session, payment_id: PaymentId) -> None:
    """Show a payment with its refunds."""
    with session.client() as client:
        found = client.payments.get(payment_id)
    session.output.item(found, PAYMENT_DETAILS)
    if session.output.format is Format.TABLE and found.refunds:
        session.output.line("")
        session.output.items(found.refunds, REFUND_COLUMNS)


def refund(session: Session, payment_id: PaymentId, amount: Amount, reason: Why) -> None:
    """Pay back a part of a payment; operators only. At most what is left of it, and of the balance."""
    asked = cents(amount)
    with session.client() as client:
        session.output.item(client.payments.refund(payment_id, asked, reason=reason), REFUND_COLUMNS)


def retry_refund(
    session: Session, refund_id: Annotated[str, typer.Argument(metavar="REFUND", help="The refund's id (rfd_…).")]
) -> None:
    """Ask the provider once more about a refund that it never answered; operators only."""
    with session.client() as client:
        session.output.item(client.payments.retry_refund(refund_id), REFUND_COLUMNS)


@command(events, "list", example="penstock billing provider-events list --state held")
def list_events(
    session: Session,
    state: Annotated[str | None, typer.Option(help="Only in this state, such as held or unmatched.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="How many at most.")] = None,
) -> None:
    """List what the payment provider told, newest first."""
    with session.client() as client:
        session.output.items(client.payments.provider_events.list(state=state, limit=limit), EVENT_COLUMNS)


@command(events, "show", example="penstock billing provider-events show evt_1NG8Du2eZvKYlo2CUI79vXWy")
def show_event(session: Session, event_id: EventId) -> None:
    """Show an event as it came."""
    with session.client() as client:
        session.output.item(client.payments.provider_events.get(event_id), EVENT_DETAILS)


@command(
    events,
    "accept",
    example="penstock billing provider-events accept evt_1NG8Du2eZvKYlo2CUI79vXWy --reason 'paid 19.99 for 20'",
)
def accept_event(
    session: Session,
    event_id: EventId,
    reason: Why,
    amount: Annotated[
        str | None, typer.Option(metavar="DOLLARS", help="Credit this; without it, what was paid.")
    ] = None,
) -> None:
    """Credit a payment that is held for review."""
    named = None if amount is None else cents(amount)
    with session.client() as client:
        done = client.payments.provider_events.accept(event_id, reason=reason, amount_microusd=named)
    session.output.item(done, EVENT_DETAILS)


@command(
    events,
    "discard",
    example="penstock billing provider-events discard evt_1NG8Du2eZvKYlo2CUI79vXWy --reason 'not ours'",
)
def discard_event(session: Session, event_id: EventId, reason: Why) -> None:
    """Put an event aside; it credits nothing."""
    with session.client() as client:
        session.output.item(client.payments.provider_events.discard(event_id, reason=reason), EVENT_DETAILS)

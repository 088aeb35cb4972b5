"""Payments over REST, and where providers tell what happened.

The webhook's body is read raw and its signature is checked before anything else looks at it; then it is stored, and
that is all: handling it is the biller's work. What cannot be stored is answered with a 5xx, so that it comes again.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final, TypeVar

import msgspec
from litestar import MediaType, Request, Response, Router, get, post
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody, Schema
from litestar.params import QueryParameter

from penstock.billing import metrics
from penstock.billing.errors import BadWebhook
from penstock.billing.paymentmodel import InboxState, Payment, PaymentTerms, Received, Refund
from penstock.billing.providers import local, signature
from penstock.billing.providers.port import Provider, ReturnUrls
from penstock.billing.service import inbox, refunds, topups
from penstock.billing.service.topups import Topups
from penstock.kit import http, idempotency, paging
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Tx
from penstock.kit.errors import Invalid, NotFound
from penstock.kit.http import path_id
from penstock.kit.idempotency import Once
from penstock.kit.paging import PageQuery
from penstock.wire import rest

S = TypeVar("S", bound=msgspec.Struct)

#: Each has an address of its own, so that no provider's events are ever taken for another's.
PROVIDERS: Final = (local.NAME, "stripe")
#: An event shows one object of the provider's, with its lists cut.
_EVENT_BYTES_MAX: Final = 256 << 10


@dataclass
class _Signed(Operation):
    """Says in the contract that the body is the provider's, and that its signature is the credential."""

    def __post_init__(self) -> None:
        """After Litestar, which finds no body among the parameters."""
        content = {"application/json": OpenAPIMediaType(schema=Schema())}
        self.request_body = RequestBody(content=content, required=True)


def router(db: Database, provider: Provider | None, urls: ReturnUrls, terms: PaymentTerms) -> Router:
    """All routes of payments, below /api/v1."""
    return Router(
        path="/",
        tags=["billing"],
        route_handlers=[
            *_payments(db, Topups(db, provider, urls)),
            *_refunds(db, provider, terms),
            *_inbox_reads(db),
            *_inbox_decisions(db),
            *(_webhook(db, provider, name) for name in PROVIDERS),
        ],
    )


def _payments(db: Database, use: Topups) -> list[Any]:
    @post("/billing/topups", operation_id="createTopup", opt={"action": "billing.write"})
    async def create_topup(caller: Caller, once: Once | None, data: rest.TopupCreate) -> Response[rest.Payment]:
        """Begin a payment. `checkout_url` in the answer is where a person pays; the balance is credited when the
        provider tells that they did."""
        payment = await use.create(caller, once, data.amount_microusd)
        return http.created(msgspec.json.encode(_payment(payment)))

    @get("/billing/payments", operation_id="listPayments")
    async def list_payments(caller: Caller, page: PageQuery) -> rest.Page[rest.Payment]:
        """The organisation's payments, newest first."""
        before = _cursor(page, "payment", 1)
        async with db.read() as conn:
            found = await topups.page(conn, caller, before=before[0] if before else "", limit=page.limit + 1)
        items = [_payment(payment) for payment in found[: page.limit]]
        more = len(found) > page.limit
        return rest.Page(items=items, next_cursor=paging.encode_cursor("payment", items[-1].id) if more else None)

    @get("/billing/payments/{payment_id:str}", operation_id="getPayment")
    async def get_payment(caller: Caller, payment_id: str) -> rest.Payment:
        """One payment with its refunds."""
        async with db.read() as conn:
            payment, refunded = await topups.show(conn, caller, path_id("pay", payment_id))
        return msgspec.structs.replace(_payment(payment), refunds=[_refund(each) for each in refunded])

    return [create_topup, list_payments, get_payment]


def _refunds(db: Database, provider: Provider | None, terms: PaymentTerms) -> list[Any]:
    @post("/billing/refunds", operation_id="createRefund", opt={"action": "billing.adjust"})
    async def create_refund(caller: Caller, once: Once | None, data: rest.RefundCreate) -> Response[rest.Refund]:
        """Pay back a part of a payment; operators only. At most what is left of the payment and of the balance. The
        amount is on hold until the provider has paid, or has refused."""
        caller.require("billing.adjust")
        name = topups.required(provider).name

        async def effect(tx: Tx) -> bytes:
            made = await refunds.request(
                tx,
                caller,
                name,
                terms,
                payment_id=data.payment_id,
                amount_microusd=data.amount_microusd,
                reason=data.reason,
            )
            return msgspec.json.encode(_refund(made))

        return http.created(await idempotency.run(db, once, effect))

    @post(
        "/billing/refunds/{refund_id:str}/retry",
        operation_id="retryRefund",
        opt={"action": "billing.adjust"},
        status_code=200,
    )
    async def retry_refund(caller: Caller, once: Once | None, refund_id: str) -> Response[rest.Refund]:
        """Ask the provider once more; operators only."""
        checked = path_id("rfd", refund_id)

        async def effect(tx: Tx) -> bytes:
            return msgspec.json.encode(_refund(await refunds.ask_again(tx, caller, checked)))

        return _ok(await idempotency.run(db, once, effect))

    return [create_refund, retry_refund]


def _inbox_reads(db: Database) -> list[Any]:
    @get("/billing/provider-events", operation_id="listProviderEvents")
    async def list_events(
        caller: Caller,
        page: PageQuery,
        event_state: Annotated[str | None, QueryParameter(name="state", required=False, enum=list(InboxState))] = None,
    ) -> rest.Page[rest.ProviderEvent]:
        """What the payment provider told, newest first; operators only."""
        before = _cursor(page, "provider_event", 2)
        async with db.read() as conn:
            found = await inbox.page(
                conn,
                caller,
                state=_state(event_state),
                before=(_time(before[0]), before[1]) if before else None,
                limit=page.limit + 1,
            )
        items = [_event(event) for event in found[: page.limit]]
        if len(found) <= page.limit:
            return rest.Page(items=items)
        last = items[-1]
        cursor = paging.encode_cursor("provider_event", last.received_at.isoformat(), last.event_id)
        return rest.Page(items=items, next_cursor=cursor)

    @get("/billing/provider-events/{event_id:str}", operation_id="getProviderEvent")
    async def get_event(caller: Caller, event_id: str) -> rest.ProviderEvent:
        """One event with its body; operators only."""
        async with db.read() as conn:
            event = await inbox.find(conn, caller, event_id)
        return msgspec.structs.replace(_event(event), body=event.body.decode("utf-8", "replace"))

    return [list_events, get_event]


def _inbox_decisions(db: Database) -> list[Any]:
    @post(
        "/billing/provider-events/{event_id:str}/accept",
        operation_id="acceptProviderEvent",
        opt={"action": "billing.adjust"},
        status_code=200,
    )
    async def accept_event(
        caller: Caller, once: Once | None, event_id: str, data: rest.ProviderEventAccept
    ) -> Response[rest.ProviderEvent]:
        """Credit a payment that is held for review; operators only."""

        async def effect(tx: Tx) -> bytes:
            done = await inbox.accept(tx, caller, event_id, amount_microusd=data.amount_microusd, reason=data.reason)
            return msgspec.json.encode(_event(done))

        return _ok(await idempotency.run(db, once, effect))

    @post(
        "/billing/provider-events/{event_id:str}/discard",
        operation_id="discardProviderEvent",
        opt={"action": "billing.adjust"},
        status_code=200,
    )
    async def discard_event(
        caller: Caller, once: Once | None, event_id: str, data: rest.ProviderEventDiscard
    ) -> Response[rest.ProviderEvent]:
        """Put an event aside that credits nothing; operators only."""

        async def effect(tx: Tx) -> bytes:
            return msgspec.json.encode(_event(await inbox.discard(tx, caller, event_id, reason=data.reason)))

        return _ok(await idempotency.run(db, once, effect))

    return [accept_event, discard_event]


def _webhook(db: Database, provider: Provider | None, name: str) -> Any:
    @post(
        f"/webhooks/{name}",
        operation_id=f"receive{name.capitalize()}Event",
        operation_class=_Signed,
        opt={"public": True, "body_bytes_max": _EVENT_BYTES_MAX},
        status_code=200,
    )
    async def receive(request: Request[Any, Any, Any]) -> rest.WebhookTaken:
        """For the payment provider: takes one event in. The signature over the raw body is the credential."""
        body = await request.body()
        if provider is None or provider.name != name:
            raise NotFound("this payment provider is not set up here")
        try:
            notice = provider.parse(body, request.headers.get(signature.HEADER, ""))
        except BadWebhook:
            metrics.WEBHOOKS.labels("refused").inc()
            raise
        return rest.WebhookTaken(received=True, new=await inbox.receive(db, name, notice, body))

    return receive


def _ok(body: Any) -> Response[Any]:
    """200 with a body that is already encoded."""
    return Response(content=body, status_code=200, media_type=MediaType.JSON)


def _cursor(page: PageQuery, kind: str, length: int) -> list[str] | None:
    if page.cursor is None:
        return None
    match paging.decode_cursor(page.cursor):
        case [str(first), *rest_] if first == kind and len(rest_) == length:
            return [str(part) for part in rest_]
        case _:
            raise Invalid("invalid cursor", field="cursor")


def _time(text: str) -> datetime:
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise Invalid("invalid cursor", field="cursor") from error
    if at.tzinfo is None:
        raise Invalid("invalid cursor", field="cursor")
    return at


def _state(text: str | None) -> InboxState | None:
    try:
        return None if text is None else InboxState(text)
    except ValueError as error:
        raise Invalid(f"state must be one of {', '.join(InboxState)}", field="state") from error


def _shown(cls: type[S], value: object) -> S:
    return msgspec.convert(value, cls, from_attributes=True)


def _payment(payment: Payment) -> rest.Payment:
    return _shown(rest.Payment, payment)


def _refund(refund: Refund) -> rest.Refund:
    return _shown(rest.Refund, refund)


def _event(event: Received) -> rest.ProviderEvent:
    return rest.ProviderEvent(
        event_id=event.event_id,
        provider=event.provider,
        type=event.type,
        state=event.state,
        reason=event.reason,
        payment_id=event.payment_id,
        attempts=event.attempts,
        received_at=event.received_at,
        handled_at=event.handled_at,
    )

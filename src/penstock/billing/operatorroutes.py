"""What operators do to the ledger over REST: grants, corrections, terms, prices, and its verification."""

from typing import Annotated, Any

import msgspec
from litestar import MediaType, Response, get, post, put
from litestar.params import QueryParameter

from penstock.billing.periods import Period
from penstock.billing.ports import Organisations
from penstock.billing.service import adjust, prices, verify
from penstock.billing.service.adjust import Adjust
from penstock.kit import http, idempotency
from penstock.kit.caller import Caller
from penstock.kit.clock import utc_now
from penstock.kit.db import Database, Tx
from penstock.kit.idempotency import Once
from penstock.kit.ids import check_id
from penstock.wire import rest

FromDay = Annotated[str | None, QueryParameter(name="from", required=False, description="Only from this day on.")]
ToDay = Annotated[str | None, QueryParameter(name="to", required=False, description="Only until this day.")]


def operator_routes(organisations: Organisations, db: Database) -> list[Any]:
    """All of them, below /api/v1/billing."""
    return [*_adjustments(Adjust(organisations), db), *_prices(db), *_verification(db)]


def _adjustments(adjustments: Adjust, db: Database) -> list[Any]:
    @post("/grants", operation_id="createGrant", opt={"action": "billing.adjust"})
    async def create_grant(caller: Caller, once: Once | None, data: rest.GrantCreate) -> Response[rest.LedgerTransfer]:
        """Give an organisation promotional credit, which is spent before its balance; operators only."""

        async def effect(tx: Tx) -> bytes:
            return msgspec.json.encode(await adjustments.grant(tx, caller, data))

        return http.created(await idempotency.run(db, once, effect))

    @post("/corrections", operation_id="createCorrection", opt={"action": "billing.adjust"})
    async def create_correction(
        caller: Caller, once: Once | None, data: rest.CorrectionCreate
    ) -> Response[rest.LedgerTransfer]:
        """Give back a part of a charge for usage to where it came from, or take back a part of a grant that is not
        spent; never more than is left of it. Operators only."""

        async def effect(tx: Tx) -> bytes:
            return msgspec.json.encode(await adjust.correct(tx, caller, data))

        return http.created(await idempotency.run(db, once, effect))

    @get("/terms/{organisation_id:str}", operation_id="getBillingTerms")
    async def get_terms(caller: Caller, organisation_id: str) -> rest.BillingTerms:
        """How far an organisation may go below zero; operators only."""
        async with db.read() as conn:
            return await adjustments.terms(conn, caller, organisation_id)

    @put("/terms/{organisation_id:str}", operation_id="putBillingTerms", opt={"action": "billing.adjust"})
    async def put_terms(
        caller: Caller, once: Once | None, organisation_id: str, data: rest.BillingTermsPut
    ) -> Response[rest.BillingTerms]:
        """How far an organisation may go below zero; operators only."""

        async def effect(tx: Tx) -> bytes:
            return msgspec.json.encode(await adjustments.set_terms(tx, caller, organisation_id, data))

        return _done(await idempotency.run(db, once, effect))

    return [create_grant, create_correction, get_terms, put_terms]


def _prices(db: Database) -> list[Any]:
    @put("/prices/{name:str}", operation_id="putPrice", opt={"action": "billing.adjust"})
    async def put_price(caller: Caller, once: Once | None, name: str, data: rest.PricePut) -> Response[rest.Price]:
        """Set what a unit of a meter costs from a time on, as a new version; operators only. What was metered at an
        earlier price keeps it."""

        async def effect(tx: Tx) -> bytes:
            return msgspec.json.encode(await prices.put(tx, caller, name, data))

        return _done(await idempotency.run(db, once, effect))

    return [put_price]


def _verification(db: Database) -> list[Any]:
    @get("/verify", operation_id="verifyLedger")
    async def verify_ledger(
        caller: Caller,
        organisation_id: Annotated[
            str | None, QueryParameter(required=False, max_length=64, description="Only of this organisation.")
        ] = None,
        from_day: FromDay = None,
        to_day: ToDay = None,
    ) -> rest.LedgerReport:
        """Recompute the ledger from its entries: checkpoints, zero sums, days, charges, corrections; operators only."""
        caller.require("billing.adjust")
        if organisation_id is not None:
            check_id("org", organisation_id, field="organisation_id")
        asked = from_day is not None or to_day is not None
        period = Period.of(from_day, to_day, today=utc_now().date()) if asked else None
        async with db.transaction() as tx:
            return await verify.verify(tx, caller, organisation_id, period)

    return [verify_ledger]


def _done(body: Any) -> Response[Any]:
    return Response(content=body, status_code=200, media_type=MediaType.JSON)

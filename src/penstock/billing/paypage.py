"""The checkout page of the local provider, and the pages that people come back to from a real one.

Whoever knows a page's address may pay there or cancel, as at a real provider; the address cannot be guessed.
"""

import html
import re
from typing import Any, Final

from litestar import MediaType, Response, get, post
from litestar.handlers import HTTPRouteHandler

from penstock.billing.paymentmodel import Payment, PaymentState
from penstock.billing.providers.local import Local
from penstock.billing.providers.port import Provider
from penstock.billing.service import topups
from penstock.kit.db import Database

_SESSION: Final = re.compile(r"cs_local_[0-9a-f]{40}")
#: A page of its own: nothing is loaded, nobody may frame it, and its address goes nowhere.
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "Referrer-Policy": "no-referrer",
}
_PAGE: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 28rem; margin: 4rem auto; padding: 0 1rem; color: #1a1a1a }}
h1 {{ font-size: 2rem; margin: 0 }}
.note {{ background: #fff6d6; border-radius: .5rem; padding: .75rem 1rem }}
form {{ display: inline }}
button {{ font: inherit; padding: .5rem 1.5rem; border: 1px solid #888; border-radius: .5rem; background: #fff }}
button.pay {{ background: #1a5fb4; border-color: #1a5fb4; color: #fff }}
</style>
<h1>{title}</h1>
{body}
</html>
"""
_SIMULATED: Final = '<p class="note">This is a simulated payment for development. No money moves.</p>'


def routes(db: Database, provider: Provider | None) -> list[HTTPRouteHandler]:
    """The pages; those of the local provider only where it is the one in use."""
    return [*_returns(), *(_checkout(db, provider) if isinstance(provider, Local) else [])]


def _returns() -> list[Any]:
    @get("/pay/done", opt={"public": True}, include_in_schema=False, media_type=MediaType.HTML)
    async def done() -> Response[str]:
        """After paying."""
        return _page("Thank you", "<p>The balance is credited as soon as the payment is confirmed.</p>")

    @get("/pay/cancelled", opt={"public": True}, include_in_schema=False, media_type=MediaType.HTML)
    async def cancelled() -> Response[str]:
        """After turning back."""
        return _page("Not paid", "<p>Nothing was charged. You may close this page.</p>")

    return [done, cancelled]


def _checkout(db: Database, provider: Local) -> list[Any]:
    async def find(session_id: str) -> Payment | None:
        if not _SESSION.fullmatch(session_id):
            return None
        async with db.read() as conn:
            return await topups.at_page(conn, provider.name, session_id)

    @get("/pay/{session_id:str}", opt={"public": True}, include_in_schema=False, media_type=MediaType.HTML)
    async def show(session_id: str) -> Response[str]:
        """The page with its two buttons."""
        return _form(await find(session_id))

    @post("/pay/{session_id:str}/pay", opt={"public": True}, include_in_schema=False, status_code=200)
    async def pay(session_id: str) -> Response[str]:
        """Pay."""
        payment = await find(session_id)
        if payment is None or payment.state is not PaymentState.OPEN:
            return _form(payment)
        await provider.pay(payment)
        return _page("Paid", f"<p>{_amount(payment)} will be on the balance in a moment.</p>{_SIMULATED}")

    @post("/pay/{session_id:str}/cancel", opt={"public": True}, include_in_schema=False, status_code=200)
    async def cancel(session_id: str) -> Response[str]:
        """Turn back."""
        payment = await find(session_id)
        if payment is None or payment.state is not PaymentState.OPEN:
            return _form(payment)
        await provider.cancel(payment)
        return _page("Cancelled", f"<p>Nothing was charged.</p>{_SIMULATED}")

    return [show, pay, cancel]


def _form(payment: Payment | None) -> Response[str]:
    if payment is None:
        return _page("No such page", "<p>Nobody is to pay here. Was the address copied as a whole?</p>", status=404)
    if payment.state is not PaymentState.OPEN:
        return _page(_amount(payment), f"<p>This payment is {html.escape(payment.state)}.</p>{_SIMULATED}")
    at = f"/pay/{payment.session_id}"
    buttons = (
        f'<form method="post" action="{at}/pay"><button class="pay">Pay</button></form> '
        f'<form method="post" action="{at}/cancel"><button>Cancel</button></form>'
    )
    return _page(_amount(payment), f"<p>Top-up {html.escape(payment.id)}</p>{_SIMULATED}<div>{buttons}</div>")


def _amount(payment: Payment) -> str:
    return f"${payment.amount_microusd // 1_000_000:,}.{payment.amount_microusd // 10_000 % 100:02d}"


def _page(title: str, body: str, *, status: int = 200) -> Response[str]:
    page = _PAGE.format(title=title, body=body)
    return Response(page, media_type=MediaType.HTML, headers=_HEADERS, status_code=status)

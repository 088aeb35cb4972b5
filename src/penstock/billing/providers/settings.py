"""Which provider an install uses. The processes that talk to one inherit these settings and call `make`."""

import ipaddress
from contextlib import suppress
from datetime import datetime
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec

from penstock.billing.paymentmodel import PaymentTerms
from penstock.billing.providers import local
from penstock.billing.providers.local import Local
from penstock.billing.providers.port import Provider, ReturnUrls
from penstock.billing.providers.signature import Secrets
from penstock.kit.errors import Invalid
from penstock.kit.telemetry import logger

_SECRET_CHARS_MIN: Final = 16
_log = logger(__name__)


class PaymentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is set for payments; shared by api and biller. Without a provider nobody can pay."""

    api_url: str = "http://127.0.0.1:8080"
    payments_provider: Literal["none", "local", "stripe"] = "none"
    payments_webhook_secret: str = ""
    #: The secret of before a rotation counts until this time (RFC 3339).
    payments_webhook_secret_previous: str = ""
    payments_webhook_previous_until: datetime | None = None
    #: Where people come back to from the provider's page; by default a page of the api.
    payments_success_url: str = ""
    payments_cancel_url: str = ""
    refund_window_days: float = 180
    stripe_api_key: str = ""
    #: Another address of Stripe's API, for tests.
    stripe_api_base: str = ""

    @property
    def payment_terms(self) -> PaymentTerms:
        """What is set for payments, whoever the provider is."""
        return PaymentTerms(refund_window_s=self.refund_window_days * 86400)

    @property
    def return_urls(self) -> ReturnUrls:
        """Where people come back to."""
        page = f"{self.api_url}/pay"
        return ReturnUrls(
            success=self.payments_success_url or f"{page}/done", cancel=self.payments_cancel_url or f"{page}/cancelled"
        )


def make(settings: PaymentSettings) -> Provider | None:
    """The provider, none without one; Invalid naming what is missing."""
    if settings.payments_provider == "none":
        return None
    secrets = _secrets(settings)
    if settings.payments_provider == "local":
        return _local(settings, secrets)
    if not settings.stripe_api_key:
        raise Invalid("payments_provider stripe needs stripe_api_key", field="stripe_api_key")
    # Here, because the library takes its time to import and most installs of a laptop never need it.
    from penstock.billing.providers.stripe import Stripe

    return Stripe(settings.stripe_api_key, secrets, api_base=settings.stripe_api_base)


def _secrets(settings: PaymentSettings) -> Secrets:
    if len(settings.payments_webhook_secret) < _SECRET_CHARS_MIN:
        raise Invalid(
            f"payments_webhook_secret must have at least {_SECRET_CHARS_MIN} characters",
            field="payments_webhook_secret",
        )
    until = settings.payments_webhook_previous_until
    if settings.payments_webhook_secret_previous and (until is None or until.tzinfo is None):
        raise Invalid(
            "payments_webhook_secret_previous needs payments_webhook_previous_until, with a time zone",
            field="payments_webhook_previous_until",
        )
    return Secrets(
        current=settings.payments_webhook_secret,
        previous=settings.payments_webhook_secret_previous,
        previous_until=until,
    )


def _local(settings: PaymentSettings, secrets: Secrets) -> Local:
    """Anybody who may top up makes money of nothing with it: it works on one's own machine only."""
    if not _on_loopback(settings.api_url):
        raise Invalid(
            "payments_provider local gives credit for nothing, so api_url must be on this machine (127.0.0.1);"
            " set payments_provider to stripe or none",
            field="payments_provider",
        )
    _log.warning("payments_are_simulated", hint="payments_provider is local: top-ups are credited and no money moves")
    return Local(
        secrets,
        pay_url=f"{settings.api_url}/pay",
        webhook_url=f"{settings.api_url}/api/v1/webhooks/{local.NAME}",
    )


def _on_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"

"""Which provider is made of which settings."""

from datetime import UTC, datetime
from typing import Any

import pytest

from penstock.billing.providers.local import Local
from penstock.billing.providers.settings import PaymentSettings, make
from penstock.billing.providers.stripe import Stripe
from penstock.kit import settings
from penstock.kit.errors import Invalid

SECRET = "whsec_0123456789abcdef"


def test_without_a_provider_nobody_can_pay() -> None:
    assert make(PaymentSettings()) is None


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost", "[::1]:8080"])
def test_the_local_provider_works_on_ones_own_machine(host: str) -> None:
    made = make(PaymentSettings(payments_provider="local", payments_webhook_secret=SECRET, api_url=f"http://{host}"))
    assert isinstance(made, Local)


@pytest.mark.parametrize("host", ["10.0.0.5", "cloud.example", "localhost.example", "0.0.0.0", "127.0.0.1.example"])
def test_the_local_provider_gives_nothing_away_to_others(host: str) -> None:
    with pytest.raises(Invalid, match="on this machine") as caught:
        make(PaymentSettings(payments_provider="local", payments_webhook_secret=SECRET, api_url=f"http://{host}"))
    assert caught.value.field == "payments_provider"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"payments_webhook_secret": ""}, "payments_webhook_secret"),
        ({"payments_webhook_secret": "short"}, "payments_webhook_secret"),
        ({"stripe_api_key": ""}, "stripe_api_key"),
        ({"payments_webhook_secret_previous": SECRET}, "payments_webhook_previous_until"),
        (
            {
                "payments_webhook_secret_previous": SECRET,
                "payments_webhook_previous_until": datetime(2026, 1, 1),  # noqa: DTZ001 - that is what is refused
            },
            "payments_webhook_previous_until",
        ),
    ],
)
def test_what_is_missing_is_named(changes: dict[str, Any], field: str) -> None:
    whole = {"payments_provider": "stripe", "payments_webhook_secret": SECRET, "stripe_api_key": "sk_test_1"}
    with pytest.raises(Invalid) as caught:
        make(PaymentSettings(**{**whole, **changes}))
    assert caught.value.field == field


def test_settings_come_from_the_environment() -> None:
    environ = {
        "PENSTOCK_PAYMENTS_PROVIDER": "stripe",
        "PENSTOCK_PAYMENTS_WEBHOOK_SECRET": SECRET,
        "PENSTOCK_PAYMENTS_WEBHOOK_PREVIOUS_UNTIL": "2026-12-01T00:00:00Z",
        "PENSTOCK_STRIPE_API_KEY": "sk_test_1",
        "PENSTOCK_REFUND_WINDOW_DAYS": "30",
    }
    loaded = settings.load(PaymentSettings, "api", environ)
    assert loaded.payments_webhook_previous_until == datetime(2026, 12, 1, tzinfo=UTC)
    assert loaded.payment_terms.refund_window_s == 30 * 86400
    assert isinstance(make(loaded), Stripe)


def test_people_come_back_to_a_page_of_the_api_or_to_what_is_set() -> None:
    plain = PaymentSettings(api_url="https://cloud.example").return_urls
    assert (plain.success, plain.cancel) == ("https://cloud.example/pay/done", "https://cloud.example/pay/cancelled")
    assert PaymentSettings(payments_success_url="https://a.example").return_urls.success == "https://a.example"

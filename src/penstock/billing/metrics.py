"""What billing counts."""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

CUSTOMERS: Final = Gauge("penstock_billing_customers", "Organisations by the state of their balance", ["state"])
CHARGED: Final = Counter("penstock_billing_charged_microusd_total", "What this biller charged")
WINDOWS: Final = Counter("penstock_billing_usage_windows_total", "Usage windows that this biller charged")
ACCRUAL_S: Final = Histogram(
    "penstock_billing_accrual_seconds", "One run of the meter", buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120)
)
BEHIND_S: Final = Gauge("penstock_billing_behind_seconds", "How much time that has passed is not charged yet")
RECORDED: Final = Counter("penstock_billing_usage_facts_total", "Facts of usage by what became of them", ["outcome"])
WEBHOOKS: Final = Counter("penstock_billing_webhooks_total", "Webhooks of payment providers", ["outcome"])
PROVIDER_EVENTS: Final = Counter(
    "penstock_billing_provider_events_total", "Events of payment providers by what became of them", ["outcome"]
)

"""Quantities and times as people read them, and how long money lasts."""

from typing import Final

from penstock.cli.text import Count, Hours
from penstock.wire.rest import Balance, InvoiceLine, UsageWindow

_ALLOCATION: Final = "allocation."


def is_time(meter: str) -> bool:
    """Whether a meter counts the time of allocations."""
    return meter.startswith(_ALLOCATION)


def used(meter: str, quantity: int) -> Hours | Count:
    """A quantity as people read it: hours of allocations."""
    return Hours(quantity) if is_time(meter) else Count(quantity)


def what(thing: InvoiceLine | UsageWindow) -> str:
    """What was used: an offer and how many GPUs of it, or a meter."""
    return f"{thing.sku} x {thing.gpus}" if thing.gpus else thing.sku or thing.meter


def remaining(found: Balance) -> str:
    """How long there is something to spend."""
    if found.available_microusd <= 0:
        return "nothing left"
    return "for ever" if found.lasts_s is None else lasting(found.lasts_s)


def lasting(seconds: float) -> str:
    """A time that may be long, in its two largest units."""
    minutes = int(seconds // 60)
    if not minutes:
        return f"{int(seconds)} s"
    days, hours = divmod(minutes // 60, 24)
    if days:
        return f"{days:,} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"

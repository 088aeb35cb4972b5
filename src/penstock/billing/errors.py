"""Why billing refuses."""

from penstock.kit.errors import Conflict, Invalid, Kind, PenstockError, Unavailable


class InsufficientFunds(PenstockError):
    """The organisation cannot pay for it."""

    kind = Kind.EXHAUSTED
    code = "billing.insufficient_funds"


class BadWebhook(Invalid):
    """A webhook's body is not what a provider sends here."""

    code = "billing.bad_webhook"


class BadSignature(BadWebhook):
    """Nobody proves that the provider sent it."""

    code = "billing.bad_signature"


class ProviderAway(Unavailable):
    """The payment provider cannot answer now."""

    code = "billing.provider_away"


class NoPayments(Conflict):
    """This install takes no payments."""

    code = "billing.no_payments"


class NotRefundable(Conflict):
    """The payment, or what is left of it, cannot be paid back."""

    code = "billing.not_refundable"


class RefundWindowOver(NotRefundable):
    """The payment is too old to be paid back."""

    code = "billing.refund_window_over"


class NotHeld(Conflict):
    """The provider's event does not wait for an operator."""

    code = "billing.not_held"


class NotCorrectable(Conflict):
    """Only charges for usage and grants can be corrected."""

    code = "billing.not_correctable"


class CorrectionTooLarge(Conflict):
    """Less is left than the correction asks for."""

    code = "billing.correction_too_large"


class MeterBusy(Unavailable):
    """Charges are being written; nobody else decides by what is left of them meanwhile."""

    code = "billing.meter_busy"


class TooMuchToVerify(Invalid):
    """The ledger is too large to be verified within one request."""

    code = "billing.too_much_to_verify"


class TooManyOpen(PenstockError):
    """The organisation has begun many payments and finished none of them."""

    kind = Kind.EXHAUSTED
    code = "billing.too_many_open_payments"


class BudgetExhausted(PenstockError):
    """A budget has no room for it."""

    kind = Kind.EXHAUSTED
    code = "billing.budget_exhausted"


class TooManyBudgets(PenstockError):
    """The project has as many budgets as it may."""

    kind = Kind.EXHAUSTED
    code = "billing.too_many_budgets"


class LeaseOver(Conflict):
    """The lease was settled or has expired; what was not settled has gone back to its budgets."""

    code = "billing.lease_over"

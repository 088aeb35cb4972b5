"""What can go wrong with webhooks, for callers."""

from penstock.kit.errors import Conflict, Kind, PenstockError


class TooManyWebhooks(PenstockError):
    """The project has as many webhooks as it may."""

    kind = Kind.EXHAUSTED
    code = "notices.too_many_webhooks"


class TooManyTests(PenstockError):
    """Earlier test events still wait."""

    kind = Kind.EXHAUSTED
    code = "notices.too_many_tests"


class WebhookPaused(Conflict):
    """Nothing is sent to a webhook that is paused."""

    code = "notices.webhook_paused"


class IllegalMove(Conflict):
    """The webhook's state does not allow this."""

    code = "notices.illegal_move"


class SecretShownBefore(Conflict):
    """A repeated request whose first answer only another credential can read."""

    code = "notices.secret_shown_before"

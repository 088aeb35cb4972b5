"""An api of its own, which these tests may leave in any state."""

from integration.api.conftest import api

__all__ = ["api"]

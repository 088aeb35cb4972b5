"""The only translation of kinds of failure into HTTP statuses, for every edge that speaks HTTP."""

from collections.abc import Mapping
from typing import Final

from penstock.kit.errors import Kind

STATUS: Final[Mapping[Kind, int]] = {
    Kind.INVALID: 400,
    Kind.UNAUTHENTICATED: 401,
    Kind.DENIED: 403,
    Kind.NOT_FOUND: 404,
    Kind.CONFLICT: 409,
    Kind.EXHAUSTED: 429,
    Kind.UNAVAILABLE: 503,
}

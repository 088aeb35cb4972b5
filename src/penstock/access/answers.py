"""Failures as the gateway's clients see them: one envelope over HTTP, close codes over WebSocket."""

from collections.abc import Mapping
from typing import Final

from aiohttp import web

from penstock.access.errors import BadResponse, PortRefused, TooLarge, UnitTimeout
from penstock.kit.errors import Kind, PenstockError
from penstock.kit.listener import envelope
from penstock.kit.statuses import STATUS

#: A gateway answers for others: these have statuses of their own.
_STATUS: Final[Mapping[type[PenstockError], int]] = {
    BadResponse: 502,
    PortRefused: 502,
    UnitTimeout: 504,
    TooLarge: 413,
}
_CLOSE: Final[Mapping[Kind, int]] = {
    Kind.INVALID: 4400,
    Kind.UNAUTHENTICATED: 4401,
    Kind.DENIED: 4403,
    Kind.NOT_FOUND: 4404,
    Kind.CONFLICT: 4409,
}


def refusal(error: PenstockError, *, realm: str) -> web.Response:
    """The answer to a request that failed as foreseen."""
    headers: dict[str, str] = {}
    if error.kind is Kind.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = f'Bearer, Basic realm="{realm}: any name, and an API key as the password"'
    if error.retry_after_s is not None or error.kind in (Kind.UNAVAILABLE, Kind.EXHAUSTED):
        headers["Retry-After"] = str(error.retry_after_s or 5)
    status = _STATUS.get(type(error), STATUS[error.kind])
    return envelope(status, error.code, error.detail, field=error.field, headers=headers)


def close_code(error: PenstockError) -> int:
    """How a WebSocket ends for this failure."""
    return _CLOSE.get(error.kind, 1011)

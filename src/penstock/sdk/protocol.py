"""How a call is made: requests, retries and decoding, without any I/O.

A call is a generator of `Request`s that is sent `Answer`s and returns the decoded value. `Unreachable` is thrown into
it. The executors only move bytes, so the blocking and the asynchronous client cannot drift apart. A request is sent
again only if the server did not act on it or acting twice has one effect (GET, PUT, PATCH, or an `Idempotency-Key`).
"""

import random
import re
import secrets
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from penstock.kit import ids
from penstock.sdk.errors import ApiError, BadAnswer, InvalidArgument, Unreachable, for_status
from penstock.wire.rest import ErrorBody, Page
from penstock.wire.unreadable import UNREADABLE

if TYPE_CHECKING:
    from penstock.sdk.transfers import Source

T = TypeVar("T")

PREFIX: Final = "/api/v1"
ANSWER_BYTES_MAX: Final = 64 << 20
ATTEMPTS_MAX: Final = 4
PAGE_ITEMS: Final = 200
_BACKOFF_FIRST_S: Final = 0.2
_BACKOFF_MAX_S: Final = 5.0
_EXCERPT_CHARS: Final = 80
_REPEATABLE: Final = frozenset({"GET", "PUT", "PATCH"})
_SLUG: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to send, after `delay_s` seconds. `path` starts at the server's root."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: "bytes | Source | None" = None
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


Steps: TypeAlias = Generator[Request, Answer, T]
Query: TypeAlias = Mapping[str, str | int | Sequence[str] | None]


def identifier(prefix: str, text: str, *, name: str) -> str:
    """`text`, if it has the shape of an id of this kind; nothing else gets into a path."""
    if not ids.is_id(prefix, text):
        raise InvalidArgument(
            f"{name} must look like {prefix}_ followed by 26 letters and digits, not {excerpt(text)!r}", field=name
        )
    return text


def slug(text: str, *, name: str) -> str:
    """`text`, if it is a name that may stand in a path."""
    if not _SLUG.fullmatch(text):
        raise InvalidArgument(
            f"{name} must be 1 to 63 lower-case letters, digits, dots and dashes, not {excerpt(text)!r}", field=name
        )
    return text


def call(
    method: str,
    path: str,
    answer: type[T],
    *,
    query: Query | None = None,
    body: msgspec.Struct | None = None,
    create: bool = False,
    delay_s: float = 0.0,
) -> Steps[T]:
    """One operation of the API. `create` makes an Idempotency-Key, the same for every attempt."""
    headers = {"Accept": "application/json"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    if create:
        headers["Idempotency-Key"] = secrets.token_hex(16)
    request = Request(
        method=method,
        path=PREFIX + path + query_string(query or {}),
        headers=headers,
        body=None if body is None else _encoded(body),
        delay_s=delay_s,
    )
    return attempts(request, answer, repeatable=create or method in _REPEATABLE)


def _encoded(body: msgspec.Struct) -> bytes:
    try:
        return msgspec.json.encode(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"it cannot be sent as JSON: {error}", field="body") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing(Generic[T]):
    """A list of the API, read as it is consumed: page by page, or whole if not `paged`; `limit` ends it early."""

    path: str
    answer: type[Page[T]]
    query: Query = field(default_factory=dict[str, str | int | Sequence[str] | None])
    limit: int | None = None
    paged: bool = True

    def page(self, cursor: str | None, *, read: int) -> Steps[Page[T]]:
        """The next page, after `read` items."""
        if not self.paged:
            return call("GET", self.path, self.answer, query=self.query)
        size = PAGE_ITEMS if self.limit is None else min(PAGE_ITEMS, self.limit - read)
        return call("GET", self.path, self.answer, query={**self.query, "limit": size, "cursor": cursor})

    def next_cursor(self, page: Page[T], *, read: int) -> str | None:
        """Where to go on; none when nothing is left to ask for."""
        return None if self.limit is not None and read >= self.limit else page.next_cursor


def query_string(values: Query) -> str:
    """The question mark and what follows it; values that are none are left out."""
    given = {name: value for name, value in values.items() if value is not None}
    return "?" + urlencode(given, doseq=True, quote_via=quote) if given else ""


def attempts(request: Request, answer_type: type[T], *, repeatable: bool) -> Steps[T]:
    """The request, and again as long as that may help and cannot do harm."""
    attempt = 0
    while True:
        attempt += 1
        try:
            answer = yield request
        except Unreachable as error:
            if attempt >= ATTEMPTS_MAX or not error.passing or (error.sent and not repeatable):
                raise
            request = replace(request, delay_s=backoff_s(attempt))
            continue
        if attempt < ATTEMPTS_MAX and _worth_repeating(answer, repeatable=repeatable):
            request = replace(request, delay_s=max(backoff_s(attempt), _retry_after_s(answer)))
            continue
        return decode(answer, answer_type)


def backoff_s(failures: int) -> float:
    """Doubling, with jitter so that many clients spread out."""
    return min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)


def _worth_repeating(answer: Answer, *, repeatable: bool) -> bool:
    if answer.status == 503:
        return repeatable
    return answer.status == 409 and repeatable and _failure(answer).code == "in_progress"


def _retry_after_s(answer: Answer) -> float:
    text = answer.headers.get("retry-after", "")
    return min(_BACKOFF_MAX_S, float(text)) if text.isdecimal() else 0.0


def decode(answer: Answer, answer_type: type[T]) -> T:
    """The typed value of a good answer; a typed error otherwise."""
    if 300 <= answer.status < 400:
        target = excerpt(answer.headers.get("location", "an unknown place"))
        raise BadAnswer(f"the server redirects to {target}; redirects are not followed", status=answer.status)
    if answer.status >= 400:
        raise _failure(answer)
    if answer_type is type(None):
        return msgspec.convert(None, answer_type)
    if answer_type is bytes:  # a document as it is
        return msgspec.convert(answer.body, answer_type)
    try:
        return msgspec.json.decode(answer.body, type=answer_type)
    except msgspec.ValidationError as error:
        raise BadAnswer(
            f"the answer has an unexpected shape: {error}", status=answer.status, correlation_id=_correlation(answer)
        ) from error
    except UNREADABLE as error:
        raise _not_json(answer) from error


def _failure(answer: Answer) -> ApiError | BadAnswer:
    try:
        detail = msgspec.json.decode(answer.body, type=ErrorBody).error
    except UNREADABLE:
        return _not_json(answer)
    return for_status(answer.status)(
        detail.message,
        code=detail.code,
        field=detail.field,
        correlation_id=detail.correlation_id,
        status=answer.status,
    )


def _not_json(answer: Answer) -> BadAnswer:
    text = excerpt(answer.body[: 4 * _EXCERPT_CHARS].decode("utf-8", "replace"))
    return BadAnswer(
        f"the answer (status {answer.status}) is not JSON: {text!r}",
        status=answer.status,
        correlation_id=_correlation(answer),
    )


def _correlation(answer: Answer) -> str | None:
    return answer.headers.get("x-correlation-id") or answer.headers.get("correlation-id")


def excerpt(text: str) -> str:
    """The first characters of a foreign text."""
    return text[:_EXCERPT_CHARS]

"""Values of the model as bodies of the API, one by one and by pages."""

from typing import Any, TypeVar

import msgspec

from penstock.kit import paging
from penstock.kit.paging import PageQuery
from penstock.wire import rest

S = TypeVar("S", bound=msgspec.Struct)


def shown(cls: type[S], value: object) -> S:
    """The value as a body."""
    return msgspec.convert(value, cls, from_attributes=True)


def encode(cls: type[S], value: object) -> bytes:
    """The same, encoded."""
    return msgspec.json.encode(shown(cls, value))


def after(page: PageQuery) -> str:
    """Where the page begins."""
    return "" if page.cursor is None else str(paging.decode_cursor(page.cursor)[0])


def page_of(cls: type[S], values: list[Any], page: PageQuery, *, by: str = "id") -> rest.Page[S]:
    """One page; the query asked for one row more, to see whether there is a next."""
    items = [shown(cls, value) for value in values[: page.limit]]
    more = len(values) > page.limit
    return rest.Page(items=items, next_cursor=paging.encode_cursor(getattr(items[-1], by)) if more else None)

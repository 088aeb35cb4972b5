"""Shapes that all bodies share: names, pages, errors."""

from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T")

Name = Annotated[str, Meta(min_length=1, max_length=63, pattern=r"^[a-zA-Z0-9]([a-zA-Z0-9._ -]*[a-zA-Z0-9])?$(?!\n)")]
Slug = Annotated[str, Meta(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$(?!\n)")]
LabelValue = Annotated[str, Meta(max_length=63, pattern=r"^[a-zA-Z0-9._/:-]*$(?!\n)")]
Labels = Annotated[dict[Slug, LabelValue], Meta(max_length=32)]
PositiveCount = Annotated[int, Meta(ge=1, le=1_000_000)]


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what clients send: unknown fields are refused, so that a typing error never passes silently."""


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """One page of a list. `next_cursor` is none on the last."""

    items: list[T]
    next_cursor: str | None = None


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What went wrong, where, and the id to quote."""

    code: str
    message: str
    correlation_id: str
    field: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The one error envelope."""

    error: ErrorDetail

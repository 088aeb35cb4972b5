"""Cursors, ids in paths, and the translation of errors."""

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from litestar import Request, get

from penstock.kit import http, paging
from penstock.kit.errors import Invalid, Kind, NotFound
from penstock.kit.statuses import STATUS

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
PARTS = st.lists(TEXT | st.integers(1 - 2**63, 2**63 - 1), max_size=4)


@given(PARTS)
def test_cursor_gives_back_what_it_was_given(parts: list[str | int]) -> None:
    assert paging.decode_cursor(paging.encode_cursor(*parts)) == parts


@given(PARTS, st.data())
def test_cursor_edited_anywhere_is_refused(parts: list[str | int], data: st.DataObject) -> None:
    cursor = paging.encode_cursor(*parts)
    position = data.draw(st.integers(0, len(cursor) - 1))
    character = data.draw(st.sampled_from("ABCwxyz0189-_=.é").filter(lambda each: each != cursor[position]))
    with pytest.raises(Invalid, match="invalid cursor"):
        paging.decode_cursor(cursor[:position] + character + cursor[position + 1 :])


@pytest.mark.parametrize("text", ["", "=", "a", "AAAA", "x" * 5000, "\x00", "W10"])
def test_what_never_was_a_cursor_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="invalid cursor"):
        paging.decode_cursor(text)


@pytest.mark.parametrize("part", [2**63, -(2**63), "a\0b"])
def test_a_cursor_that_no_statement_could_take_is_refused(part: str | int) -> None:
    with pytest.raises(Invalid, match="invalid cursor"):
        paging.decode_cursor(paging.encode_cursor(part))


def test_malformed_id_in_a_path_is_not_found() -> None:
    with pytest.raises(NotFound):
        http.path_id("prj", "prj_short")
    assert http.path_id("prj", "prj_default") == "prj_default"


def test_every_kind_has_a_status() -> None:
    assert set(STATUS) == set(Kind)


async def test_a_route_cannot_replace_authentication() -> None:
    async def nothing(_: Request[Any, Any, Any]) -> None:
        return None

    @get("/open", before_request=nothing)
    async def opened() -> None:
        return None

    with pytest.raises(RuntimeError, match="authenticates"):
        http.application([opened], cast("Any", None))

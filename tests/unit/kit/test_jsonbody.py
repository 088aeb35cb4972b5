"""Strict bodies: what is wrong and where."""

import json
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from penstock.kit import jsonbody
from penstock.kit.errors import Invalid


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    size: int


class Body(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(max_length=5, pattern="^[a-z]*$")] = ""
    count: Annotated[int, Meta(ge=1, le=9)] = 1
    labels: dict[Annotated[str, Meta(pattern="^[a-z]+$")], str] = {}
    parts: Annotated[list[Inner], Meta(max_length=2)] = []
    flag: bool = False
    price_microusd: Annotated[int, Meta(ge=10_000, le=10**12, multiple_of=10_000)] = 10_000


DECODER = msgspec.json.Decoder(Body)


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        (b"", "$", "body required"),
        (b"{", "$", "body is not valid JSON at byte 1"),
        ('{"name":"é'.encode() + b'"]', "$", "body is not valid JSON at byte 12"),
        (b'{"count":NaN}', "$", "body is not valid JSON at byte 9"),
        (b'{"count":1} x', "$", "body is not valid JSON at byte 12"),
        (b'{"name":"\xff"}', "$", "body is not valid UTF-8 at byte 9"),
        (b"\xef\xbb\xbf{}", "$", "body is not valid JSON at byte 0"),
        (b"[]", "$", "body: expected an object, not list"),
        (b"null", "$", "body: expected an object, not null"),
        (b'{"count":1.5}', "count", "count: expected an integer, not number"),
        (b'{"count":"1"}', "count", "count: expected an integer, not string"),
        (b'{"count":10}', "count", "count: max 9"),
        (b'{"count":0}', "count", "count: min 1"),
        (b'{"price_microusd":0}', "price_microusd", "price_microusd: min 10000 ($0.01)"),
        (
            b'{"price_microusd":9999999999990000}',
            "price_microusd",
            "price_microusd: max 1000000000000 ($1,000,000.00)",
        ),
        (b'{"price_microusd":10001}', "price_microusd", "price_microusd: must be a multiple of 10000 ($0.01)"),
        (b'{"flag":1}', "flag", "flag: expected true or false, not integer"),
        (b'{"name":"abcdef"}', "name", "name: max 5 characters"),
        (b'{"name":"AB"}', "name", "name: must match the pattern ^[a-z]*$"),
        (b'{"name":"a\\u0000"}', "name", "name: control characters are not allowed (U+0000)"),
        (b'{"name":"a\x7f"}', "name", "name: control characters are not allowed (U+007F)"),
        ('{"labels":{"a":"\u202e"}}'.encode(), "labels.a", "labels.a: control characters are not allowed (U+202E)"),
        (b'{"name":"\\ud800"}', "name", "name: invalid unicode, half of a surrogate pair"),
        (
            b'{"parts":[{"size":1},{"size":true}]}',
            "parts[1].size",
            "parts[1].size: expected an integer, not true or false",
        ),
        (b'{"parts":[{}]}', "parts[0].size", "parts[0].size: required"),
        (b'{"parts":[{"size":1},{"size":1},{"size":1}]}', "parts", "parts: max 2 entries"),
        (b'{"role":"owner"}', "role", "role: unknown or read-only field"),
        (
            b'{"parts":[{"size":1,"tenant_id":1}]}',
            "parts[0].tenant_id",
            "parts[0].tenant_id: unknown or read-only field",
        ),
        (b'{"labels":{"A B":"x"}}', "labels", "labels: must match the pattern ^[a-z]+$"),
        (b'{"count":1,"count":8}', "count", "duplicate key 'count'"),
        (b'{"labels":{"a":"1","a":"2"}}', "a", "duplicate key 'a'"),
        (b'{"count":' + b"9" * 5000 + b"}", "$", "body is nested too deeply or holds too large a number"),
    ],
)
def test_refusal_names_field_and_limit(body: bytes, field: str, message: str) -> None:
    with pytest.raises(Invalid) as caught:
        jsonbody.decode(body, DECODER)
    assert caught.value.detail == message
    assert caught.value.field == field


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(Invalid, match="nested too deeply"):
        jsonbody.decode(b'{"labels":' + b"[" * 200_000, DECODER)


def test_line_ends_and_escaped_backslashes_pass() -> None:
    decoder = msgspec.json.Decoder(list[str])
    assert jsonbody.decode(b'["a\\n\\tb", "\\\\ud800", "\xc3\xa9"]', decoder) == ["a\n\tb", "\\ud800", "é"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_body_is_decoded_or_refused(body: bytes) -> None:
    """Nothing but Invalid ever comes out."""
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(dict[str, Any])
    try:
        decoded = jsonbody.decode(body, decoder)
    except Invalid:
        return
    assert decoded == json.loads(body)

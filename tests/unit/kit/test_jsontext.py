"""Bodies cost what their size says, whatever their shape."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costs import assert_linear
from penstock.kit import jsonbody, jsontext
from penstock.kit.errors import Invalid

ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder(msgspec.Raw)
SCHEMA: msgspec.json.Decoder[Any] = msgspec.json.Decoder(msgspec.defstruct("S", [], forbid_unknown_fields=True))
UNSAFE = '"\\u0000"'


def listed(piece: str, end: str = UNSAFE) -> Any:
    return lambda size: f"[{piece * (size // len(piece.encode()))}{end}]".encode()


def keyed(size: int) -> bytes:
    return ("{" + ",".join(f'"é{number}":1' for number in range(size // 10)) + "}").encode()


def deep(size: int) -> bytes:
    """Long keys on the way down, many elements at the end: the longest paths for the fewest bytes."""
    key = "é" * (size // 64)
    return ("".join(f'{{"{key}":' for _ in range(16)) + "[" + '"é",' * (size // 8) + UNSAFE + "]" + "}" * 16).encode()


SHAPES = {
    "empty lists": listed("[],"),
    "empty lists that nobody refuses": listed("[],", "1"),
    "empty objects": listed("{},"),
    "strings": listed('"é",'),
    "empty strings": listed('"",'),
    "escapes": listed('"\\n\\u00e9",'),
    "one string": lambda size: b'["' + b"\xc3\xa9" * (size // 2) + UNSAFE[1:].encode() + b"]",
    "one string of escapes": lambda size: b'["' + b"\\n" * (size // 2) + UNSAFE[1:].encode() + b"]",
    "numbers": listed("1,"),
    "long numbers": listed("9" * 99 + ","),
    "one number": lambda size: b"9" * size,
    "spaces": listed(" "),
    "objects with a key": listed('{"a":1},'),
    "keys": keyed,
    "long keys above many elements": deep,
    "a string that does not end": lambda size: b'["' + b'\\"' * (size // 2),
    "quotes": lambda size: b'"' * size,
    "depth": lambda size: b"[" * size,
    "depth of objects": lambda size: b'{"a":' * (size // 5),
    "closing only": lambda size: b"]" * size,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_body_costs_what_its_size_says(shape: str) -> None:
    assert_linear(lambda body: jsonbody.decode(body, ANY), SHAPES[shape], refusals=(Invalid,))


def test_an_unknown_field_that_looks_like_a_place_costs_what_its_size_says() -> None:
    assert_linear(
        lambda body: jsonbody.decode(body, SCHEMA),
        lambda size: json.dumps({" - at `$" * (size // 8): "x"}).encode(),
        refusals=(Invalid,),
    )


@pytest.mark.parametrize("escape", ["\\b", "\\f", "\\u0008", "\x7f", "\\u202e", "\\ud800", "\\udc00\\ud800"])
def test_unsafe_characters_are_refused_however_they_are_written(escape: str) -> None:
    with pytest.raises(Invalid) as caught:
        jsonbody.decode(f'{{"a":[1,{{"b c":["x","{escape}"]}}]}}'.encode(), ANY)
    assert caught.value.field == "a[1].b c[1]"


def test_an_error_repeats_little_of_what_was_sent() -> None:
    for body in ({"x" * 100_000: 1}, {"a": {"x" * 100_000: "\0"}}):
        with pytest.raises(Invalid) as caught:
            jsonbody.decode(json.dumps(body).encode(), SCHEMA)
        assert len(caught.value.detail) < 400
        assert len(caught.value.field or "") < 300


SAFE = st.text(st.characters(min_codepoint=0x20, exclude_categories=["Cs", "Cc", "Cf"]), min_size=1, max_size=8)
DOCUMENT = st.recursive(
    st.none() | st.booleans() | st.integers() | SAFE,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(SAFE, inner, max_size=5),
    max_leaves=30,
)


@given(DOCUMENT, st.booleans(), st.sampled_from([None, 1]))
def test_good_documents_pass_as_they_are(document: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(document, ensure_ascii=ascii_only, indent=indent)
    jsontext.check(text)
    assert json.loads(bytes(jsonbody.decode(text.encode(), ANY))) == document


@given(DOCUMENT, st.data())
@settings(max_examples=200)
def test_the_path_leads_to_what_is_refused(document: Any, data: st.DataObject) -> None:
    place, document = _planted(document, data)
    with pytest.raises(Invalid) as caught:
        jsontext.check(json.dumps(document))
    assert caught.value.field == (place or "$")


def _planted(value: Any, data: st.DataObject) -> tuple[str, Any]:
    """The document with an unsafe string somewhere inside, and its place as the error names it."""
    if isinstance(value, list) and value and data.draw(st.booleans()):
        index = data.draw(st.integers(0, len(value) - 1))
        place, inner = _planted(value[index], data)
        return f"[{index}]{'.' * bool(place and place[0] != '[')}{place}", [*value[:index], inner, *value[index + 1 :]]
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(value)))
        place, inner = _planted(value[key], data)
        dotted = place if not place or place[0] == "[" else f".{place}"
        return f"{key}{dotted}", {**value, key: inner}
    return "", "\0"


@given(st.text(alphabet='[]{},:"\\ab1 \n', max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Nothing but Invalid ever comes out, and what json.loads takes without repeats is taken."""
    try:
        value = jsonbody.decode(text.encode(), ANY)
    except Invalid:
        return
    json.loads(bytes(value))

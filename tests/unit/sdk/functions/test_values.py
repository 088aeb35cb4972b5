"""Arguments and results on their way."""

import enum
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sdk.functions import errors, outcome, values
from penstock.sdk.functions.transport import Answer

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


class Odd(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__("odd")


@given(PLAIN)
def test_what_json_keeps_goes_as_json_and_comes_back(value: Any) -> None:
    if values.exact(value):
        content_type, body, encoding = values.encode_result(value, sdk=True)
        assert (content_type, encoding) == (values.JSON, "")
        found = json.loads(body)
        assert found == value
        assert type(found) is type(value)


@given(PLAIN, PLAIN)
def test_every_call_comes_back(first: Any, second: Any) -> None:
    payload = values.encode_call((first,), {"x": second}, "m")
    call = values.decode_call(payload.content_type, json.loads(payload.text))
    assert call is not None
    assert (call.args, call.kwargs, call.method, call.sdk) == ((first,), {"x": second}, "m", True)


@pytest.mark.parametrize(
    "value",
    [(1,), {1: 2}, b"x", {1}, float("nan"), float("inf"), 1 << 63, "\ud800", Colour.RED, Text("a"), [{"a": (1,)}]],
)
def test_what_json_would_change_is_pickled(value: Any) -> None:
    assert not values.exact(value)
    content_type, body, encoding = values.encode_result(value, sdk=True)
    assert (content_type, encoding) == (values.PICKLE, "base64")
    found = values.decode_result(content_type, json.loads(body), encoding)
    assert type(found) is type(value)
    assert found == value or value != value
    chunk = json.loads(values.encode_chunk(value, sdk=True))
    assert type(values.decode_chunk(chunk)) is type(value)


def test_a_cycle_is_not_exact_and_no_plain_result() -> None:
    ring: list[Any] = []
    ring.append(ring)
    assert not values.exact(ring)
    with pytest.raises(TypeError, match="of type list, is not JSON"):
        values.encode_result(ring, sdk=False)


@pytest.mark.parametrize(
    "payload",
    [
        None,
        1,
        "x",
        [],
        {},
        {"args": []},
        {"args": 1, "kwargs": {}},
        {"args": [], "kwargs": []},
        {"args": [], "kwargs": {}, "x": 1},
    ],
)
def test_anything_else_is_a_plain_payload(payload: Any) -> None:
    assert values.decode_call(values.JSON, payload) is None


@pytest.mark.parametrize(
    ("payload", "args", "kwargs"),
    [
        ({"method": "add"}, (), {}),
        ({"method": "add", "args": [1]}, (1,), {}),
        ({"method": "add", "kwargs": {"x": 1}}, (), {"x": 1}),
    ],
)
def test_a_call_that_names_a_method_may_leave_out_arguments(payload: Any, args: Any, kwargs: Any) -> None:
    call = values.decode_call(values.JSON, payload, methods=["add"])
    assert call is not None
    assert (call.method, call.args, call.kwargs, call.sdk) == ("add", args, kwargs, False)


@pytest.mark.parametrize("payload", [{"method": "other"}, {"method": []}, {"method": "add", "x": 1}, {"args": []}])
def test_what_names_none_of_the_methods_is_a_plain_payload(payload: Any) -> None:
    assert values.decode_call(values.JSON, payload, methods=["add"]) is None


def test_plain_callers_get_json_bytes_or_a_word_about_the_type() -> None:
    assert values.encode_result((1, 2), sdk=False) == (values.JSON, b"[1,2]", "")
    content_type, body, encoding = values.encode_result(b"\x00", sdk=False)
    assert values.decode_result(content_type, json.loads(body), encoding) == b"\x00"
    for value in (object(), {1}, float("nan"), {"a": Odd}):
        with pytest.raises(TypeError, match=f"of type {type(value).__name__}"):
            values.encode_result(value, sdk=False)


def test_exceptions_travel_where_they_can() -> None:
    text = values.encode_exception(KeyError("x"))
    assert text is not None
    assert repr(values.decode_exception(text)) == "KeyError('x')"
    odd = values.encode_exception(Odd(1, 2))
    assert odd is not None
    assert values.decode_exception(odd) is None
    assert values.encode_exception(ValueError("x" * values.EXCEPTION_BYTES_MAX)) is None
    assert values.encode_exception(ValueError(lambda: None)) is None
    assert values.decode_exception("rubbish") is None


def failed(**fields: Any) -> Answer:
    return Answer(**{"invocation_id": "inv-1", "state": "failed", "traceback": "Traceback there\n"} | fields)


def test_the_handlers_own_exception_is_raised_with_its_traceback() -> None:
    answer = failed(body={"exception": values.encode_exception(LookupError("gone"))})
    with pytest.raises(LookupError, match="gone") as caught:
        outcome.value(answer)
    assert "Traceback there" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        ({"error": "no", "error_type": "Spoilt"}, errors.FunctionFailed, "inv-1: Spoilt: no"),
        ({"state": "expired", "error": "30 s"}, errors.FunctionExpired, "30 s"),
        ({"state": "cancelled"}, errors.FunctionCancelled, "cancelled"),
        (
            {"state": "dead_lettered", "failure_class": "retry_exhausted"},
            errors.FunctionDeadLettered,
            "retry_exhausted",
        ),
        ({"body": {"exception": "rubbish"}}, errors.FunctionFailed, "failed"),
        ({"body": {"exception": values.encode_exception(SystemExit(3))}}, errors.FunctionFailed, "failed"),
    ],
)
def test_other_ends_have_errors_of_their_own(fields: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says) as caught:
        outcome.value(failed(**fields))
    assert isinstance(caught.value, errors.RemoteError)
    assert caught.value.traceback == "Traceback there\n"

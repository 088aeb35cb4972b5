"""Whatever a reply says, the outcome is within the contract, and what is kept out of line is what callers get."""

import base64

import msgspec
import pytest

from penstock.node.sidecar import answers
from penstock.node.sidecar.errors import BrokenAnswer, TooLarge
from penstock.wire.serverless import ERROR_BYTES_MAX, FailureClass, FrameworkReply, State


def kept(reply: FrameworkReply, bytes_max: int = 1 << 30) -> bytes:
    length, pieces = answers.content(answers.judged(reply), bytes_max)
    content = b"".join(pieces)
    assert len(content) == length
    return content


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 1000, (3 << 18) - 1, 3 << 18, (3 << 18) + 1])
def test_bytes_come_out_as_they_went_in(size: int) -> None:
    raw = bytes(range(256)) * (size // 256 + 1)
    text = base64.b64encode(raw[:size]).decode()
    reply = FrameworkReply(encoding="base64", body=msgspec.Raw(msgspec.json.encode(text)), contentType="image/png")
    assert kept(reply) == raw[:size]


@pytest.mark.parametrize(
    ("content_type", "body", "bytes_kept"),
    [
        ("application/json", b'"a"', b'"a"'),
        ("application/problem+json; charset=utf-8", b'"a"', b'"a"'),
        ("text/plain", rb'"\u00e9\n"', "é\n".encode()),
        ("text/plain", b'{"a":1}', b'{"a":1}'),
    ],
)
def test_text_is_kept_as_text_and_json_as_json(content_type: str, body: bytes, bytes_kept: bytes) -> None:
    assert kept(FrameworkReply(contentType=content_type, body=msgspec.Raw(body))) == bytes_kept


@pytest.mark.parametrize("body", [b"5", b'"abc"', b'"ab=c"', b'"a\\u0062cd"', b'"@@@@"', b"null"])
def test_what_is_not_base64_is_refused_where_it_says_so(body: bytes) -> None:
    with pytest.raises(BrokenAnswer):
        answers.judged(FrameworkReply(encoding="base64", body=msgspec.Raw(body)))


def test_the_limit_is_of_what_callers_get() -> None:
    reply = FrameworkReply(body=msgspec.Raw(b"123"))
    assert kept(reply, 3) == b"123"
    with pytest.raises(TooLarge):
        kept(reply, 2)


def test_errors_are_cut_to_whole_characters() -> None:
    outcome = answers.judged(FrameworkReply(statusCode=400, error="é" * ERROR_BYTES_MAX))
    assert (outcome.state, outcome.failure) == (State.FAILED, FailureClass.HANDLER_ERROR)
    assert len(outcome.error.encode()) == ERROR_BYTES_MAX

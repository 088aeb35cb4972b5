"""Small decisions of the public listener."""

import base64

import pytest

from penstock.access.edge import credential, port_number
from penstock.access.errors import NodeUnreachable, NotRunnable, PortRefused, from_abort
from penstock.kit.errors import Invalid, NotFound, Unavailable
from penstock.kit.stream import StreamAborted


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("Bearer psk_x", "Bearer psk_x"),
        (basic("anybody:psk_x"), "Bearer psk_x"),
        (basic(":psk:x"), "Bearer psk:x"),
        (basic("no colon"), "Bearer "),
        ("basic " + basic("a:b").split()[1], "Bearer b"),
        ("Basic %%%", None),
        ("Basic " + base64.b64encode(b"\xff:\xff").decode(), None),
    ],
)
def test_password_of_basic_authentication_is_the_key(header: str | None, expected: str | None) -> None:
    assert credential(header) == expected


@pytest.mark.parametrize("text", ["0", "65536", "", "8a", "-1", "+1", " 1", "1_0", "٣", "00000001"])
def test_port_must_be_a_port(text: str) -> None:
    with pytest.raises(Invalid) as caught:
        port_number(text)
    assert caught.value.field == "port"


def test_streams_end_in_words_for_the_customer() -> None:
    assert isinstance(from_abort(StreamAborted("no_unit"), port=80), NotFound)
    assert isinstance(from_abort(StreamAborted("refused"), port=80), PortRefused)
    assert isinstance(from_abort(StreamAborted("refused", "no such program")), NotRunnable)
    assert isinstance(from_abort(StreamAborted("lost"), port=80), NodeUnreachable)
    assert isinstance(from_abort(StreamAborted("no_node"), port=80), NodeUnreachable)
    assert isinstance(from_abort(StreamAborted("exhausted")), Unavailable)

"""Small decisions of the public listener."""

import pytest

from penstock.access.edge import port_number, realm
from penstock.access.errors import NodeUnreachable, NotRunnable, PortRefused, from_abort
from penstock.kit.errors import Invalid, NotFound, Unavailable
from penstock.kit.stream import StreamAborted


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


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/u/alc_00000000000000000000000000/8000/", "Penstock alc_00000000000000000000000000"),
        ("/u/alc_00000000000000000000000001/8000/", "Penstock alc_00000000000000000000000001"),
        ('/u/"quoted"/8000/', "Penstock"),
        ("/u/", "Penstock"),
        ("/ws/exec/alc_00000000000000000000000000", "Penstock"),
    ],
)
def test_browser_asks_for_the_key_once_per_unit(path: str, expected: str) -> None:
    assert realm(path) == expected

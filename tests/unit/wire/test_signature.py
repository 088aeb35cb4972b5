"""Signatures of what is sent out, as a receiver checks them."""

import hashlib
import hmac

import pytest

from penstock.wire import signature

BODY, AT = b'{"event_id":"evt_1"}', 1_800_000_000


def test_a_receiver_needs_five_lines() -> None:
    header = signature.sign(BODY, ["whs_a"], at=AT)
    pairs = [pair.split("=", 1) for pair in header.split(",")]
    expected = hmac.new(b"whs_a", pairs[0][1].encode() + b"." + BODY, hashlib.sha256).hexdigest()
    assert pairs == [["t", str(AT)], ["v1", expected]]


def test_either_secret_fits_while_they_are_exchanged() -> None:
    header = signature.sign(BODY, ["whs_new", "whs_old"], at=AT)
    assert header.count("v1=") == 2
    assert [signature.verify(BODY, header, each, now=AT) for each in ("whs_new", "whs_old", "whs_x")] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(("now", "fits"), [(AT + 300, True), (AT - 300, True), (AT + 301, False), (AT - 301, False)])
def test_an_old_message_is_refused(now: int, fits: bool) -> None:
    assert signature.verify(BODY, signature.sign(BODY, ["s"], at=AT), "s", now=now) is fits


@pytest.mark.parametrize("header", ["", "t=1", "v1=00", "t=abc,v1=" + "0" * 64, "t=-1,v1=" + "0" * 64, "x"])
def test_what_is_no_signature_is_refused(header: str) -> None:
    assert not signature.verify(BODY, header, "s", now=AT)


def test_another_body_or_time_does_not_fit() -> None:
    header = signature.sign(BODY, ["s"], at=AT)
    assert not signature.verify(BODY + b" ", header, "s", now=AT)
    assert not signature.verify(BODY, header.replace(f"t={AT}", f"t={AT + 1}"), "s", now=AT)

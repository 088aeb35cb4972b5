"""Who sent a webhook, and when."""

from datetime import UTC, datetime

import msgspec
import pytest
from stripe import WebhookSignature

from penstock.billing.errors import BadSignature, BadWebhook
from penstock.billing.providers import events, signature
from penstock.billing.providers.signature import Secrets

NOW = 1_800_000_000.0
BODY = b'{"id":"evt_1","n":1.0}'
SECRETS = Secrets(current="whsec_current_secret")


def check(body: bytes, header: str, secrets: Secrets = SECRETS) -> None:
    signature.verify(body, header, secrets, clock=lambda: NOW)


def refused(body: bytes, header: str, *, says: str, secrets: Secrets = SECRETS) -> None:
    with pytest.raises(BadSignature) as caught:
        check(body, header, secrets)
    assert says in caught.value.detail
    assert caught.value.field == "Stripe-Signature"


def signed(at: float = NOW, secret: str = SECRETS.current, body: bytes = BODY) -> str:
    return signature.sign(body, secret, at=at)


def test_what_was_signed_just_now_passes() -> None:
    for at in (NOW, NOW - 300, NOW + 300):
        check(BODY, signed(at))


def test_one_of_several_signatures_is_enough() -> None:
    stamp, mac = signed().split(",")
    check(BODY, f"{stamp},v1={'0' * 64},{mac},v0=abc")


@pytest.mark.parametrize("at", [NOW - 301, NOW + 301, 0])
def test_what_is_late_or_early_is_refused(at: float) -> None:
    refused(BODY, signed(at), says="outside the tolerance of 300 s")


@pytest.mark.parametrize("stamp", ["abc", "-5", "", "+1800000000", "1_800_000_000", "1800000000.0", "\u0661", "9" * 13])
def test_a_time_that_is_no_plain_number_is_refused(stamp: str) -> None:
    mac = signed().split("v1=")[1]
    refused(BODY, f"t={stamp},v1={mac}", says="printable" if stamp == "\u0661" else "number of seconds")


@pytest.mark.parametrize(
    "header", ["t=1800000000", "v1=00", "t=1,t=2,v1=00", "t=1800000000,v1=", "nonsense", "=", ",,,"]
)
def test_a_header_without_its_parts_is_refused(header: str) -> None:
    refused(BODY, header, says="Stripe-Signature")


def test_a_header_is_needed_and_bounded() -> None:
    refused(BODY, "", says="missing")
    refused(BODY, signed() + "," + "x" * 5000, says="4096")
    refused(BODY, signed() + ",v1=\xe9", says="printable")


def test_other_bytes_of_the_same_meaning_are_refused() -> None:
    for body in (b'{"id": "evt_1", "n": 1.0}', b'{"id":"evt_1","n":1}', b"\xef\xbb\xbf" + BODY, BODY + b"\n", b"\xff"):
        refused(body, signed(), says="does not match")


def test_the_secret_of_before_counts_until_its_time() -> None:
    until = datetime.fromtimestamp(NOW + 1, UTC)
    rotated = Secrets(current="whsec_new_secret_x", previous=SECRETS.current, previous_until=until)
    check(BODY, signed(), rotated)
    check(BODY, signed(secret=rotated.current), rotated)
    over = Secrets(current=rotated.current, previous=SECRETS.current, previous_until=datetime.fromtimestamp(NOW, UTC))
    refused(BODY, signed(), says="does not match", secrets=over)


def test_our_signatures_are_those_of_the_library() -> None:
    assert WebhookSignature.verify_header(BODY, signed(), SECRETS.current)


def event(**changes: object) -> bytes:
    values = {"id": "evt_1", "type": "a.b", "livemode": False, "data": {"object": {}}, **changes}
    return msgspec.json.encode({name: value for name, value in values.items() if value is not None})


def test_an_event_is_read_strictly() -> None:
    assert events.decode(event(), livemode=False).id == "evt_1"
    for changes in ({"id": "a\0b"}, {"id": ""}, {"id": 5}, {"type": "x" * 200}, {"data": None}, {"livemode": None}):
        with pytest.raises(BadWebhook):
            events.decode(event(**changes), livemode=False)
    for body in (b"", b"[]", b"{", b"\xff", b"\xef\xbb\xbf{}"):
        with pytest.raises(BadWebhook):
            events.decode(body, livemode=False)


@pytest.mark.parametrize("livemode", [True, False])
def test_an_event_of_the_other_mode_is_refused(livemode: bool) -> None:
    with pytest.raises(BadWebhook, match="wrong mode"):
        events.decode(event(livemode=not livemode), livemode=livemode)

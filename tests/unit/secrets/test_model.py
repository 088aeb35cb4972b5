"""The envelope: only the right key opens it, only for the right place, and only unchanged."""

import os
from dataclasses import replace

import pytest

from penstock.secrets.errors import Tampered
from penstock.secrets.model import KEY_BYTES, Envelope, MasterKey, Place, rewrap, seal, unseal

PLACE = Place(project_id="prj_a", name="token", version=3)
KEY = MasterKey(id="smk_1", raw=os.urandom(KEY_BYTES))
OTHER = MasterKey(id="smk_2", raw=os.urandom(KEY_BYTES))
VALUE = b"canary-value-4711"


@pytest.mark.parametrize("value", [b"x", VALUE, bytes(range(256)), b"\0" * (64 << 10)])
def test_what_was_sealed_is_unsealed(value: bytes) -> None:
    assert unseal(PLACE, seal(PLACE, value, KEY), KEY) == value


def test_nothing_of_the_value_or_a_key_is_in_the_envelope() -> None:
    envelope = seal(PLACE, VALUE, KEY)
    for stored in (envelope.sealed, envelope.wrapped_key):
        assert VALUE not in stored
        assert KEY.raw not in stored
    assert "raw" not in repr(KEY)


def test_the_same_value_never_looks_the_same() -> None:
    first, second = seal(PLACE, VALUE, KEY), seal(PLACE, VALUE, KEY)
    assert first.sealed != second.sealed
    assert first.wrapped_key != second.wrapped_key


@pytest.mark.parametrize(
    "place",
    [
        replace(PLACE, project_id="prj_b"),
        replace(PLACE, name="tokens"),
        replace(PLACE, version=4),
        replace(PLACE, project_id="prj_a\0token", name="3"),
    ],
)
def test_an_envelope_that_was_moved_does_not_open(place: Place) -> None:
    with pytest.raises(Tampered):
        unseal(place, seal(PLACE, VALUE, KEY), KEY)


def test_a_data_key_does_not_open_elsewhere_even_with_its_own_value() -> None:
    """Both parts are bound: exchanging one of them between two secrets is found too."""
    mine, theirs = seal(PLACE, VALUE, KEY), seal(replace(PLACE, name="other"), b"theirs", KEY)
    for mixed in (replace(mine, sealed=theirs.sealed), replace(mine, wrapped_key=theirs.wrapped_key)):
        with pytest.raises(Tampered):
            unseal(PLACE, mixed, KEY)


@pytest.mark.parametrize("part", ["sealed", "wrapped_key"])
@pytest.mark.parametrize("at", [0, 11, 12, -1])
def test_one_changed_bit_is_found(part: str, at: int) -> None:
    envelope = seal(PLACE, VALUE, KEY)
    changed = bytearray(getattr(envelope, part))
    changed[at] ^= 1
    with pytest.raises(Tampered):
        unseal(PLACE, replace(envelope, **{part: bytes(changed)}), KEY)


@pytest.mark.parametrize("content", [b"", b"short", b"\0" * 12])
def test_what_is_too_short_is_no_crash(content: bytes) -> None:
    with pytest.raises(Tampered):
        unseal(PLACE, Envelope(sealed=content, wrapped_key=content, key_id=KEY.id), KEY)


def test_another_master_key_opens_nothing() -> None:
    with pytest.raises(Tampered):
        unseal(PLACE, seal(PLACE, VALUE, KEY), OTHER)


def test_a_rewrapped_value_opens_with_the_new_key_only() -> None:
    envelope = seal(PLACE, VALUE, KEY)
    moved = rewrap(PLACE, envelope, KEY, OTHER)
    assert (moved.key_id, moved.sealed) == (OTHER.id, envelope.sealed)
    assert unseal(PLACE, moved, OTHER) == VALUE
    with pytest.raises(Tampered):
        unseal(PLACE, moved, KEY)


def test_the_failure_names_nothing_that_is_secret() -> None:
    with pytest.raises(Tampered) as caught:
        unseal(replace(PLACE, version=9), seal(PLACE, VALUE, KEY), KEY)
    assert "token" not in caught.value.detail
    assert caught.value.__cause__ is None

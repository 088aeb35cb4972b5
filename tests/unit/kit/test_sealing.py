"""Sealed secrets."""

from penstock.kit.sealing import seal, unseal


def test_only_the_same_credential_opens_it() -> None:
    sealed = seal("psk_secret", credential="Bearer mine")
    assert "secret" not in sealed
    assert unseal(sealed, credential="Bearer mine") == "psk_secret"
    assert unseal(sealed, credential="Bearer theirs") is None
    assert seal("psk_secret", credential="Bearer mine") != sealed

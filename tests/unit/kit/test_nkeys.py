"""Keys and tokens as NATS writes them."""

import pytest

from penstock.kit import nkeys
from penstock.kit.errors import Invalid
from penstock.kit.nkeys import Issuer

_SEED = "SAANDLKMXL6CUS3CP52WIXBEDN6YJ545GDKC65U5JZPPV6WH6ESWUA6YAI"


def test_a_seed_gives_the_key_that_other_tools_give() -> None:
    assert Issuer(_SEED).public == "ABJHLOVMPA4CI6R5KLNGOB4GSLNIY7IOUPAJC4YFNDLQVIOBYQGUWVLA"


def test_every_seed_is_another_and_is_an_accounts() -> None:
    seeds = {nkeys.new_account_seed() for _ in range(20)}
    assert len(seeds) == 20
    assert all(seed.startswith("SA") and Issuer(seed).public.startswith("A") for seed in seeds)


def test_what_was_signed_can_be_read() -> None:
    issuer = Issuer(_SEED)
    claims = nkeys.read(issuer.sign({"sub": "x", "nats": {"type": "user"}}).encode())
    assert (claims["sub"], claims["nats"], claims["iss"]) == ("x", {"type": "user"}, issuer.public)


@pytest.mark.parametrize(
    "seed",
    [
        "",
        "SA",
        "not a seed",
        _SEED[:-1] + "A",
        _SEED.replace("N", "O", 1),
        # A user's, and an account's public key.
        "SUAMLK2ZNL35WSMW37E7UD4VZ7ELPKW7DHC3BWBSD2GCZ7IUQQXZIORRBU",
        "ABJHLOVMPA4CI6R5KLNGOB4GSLNIY7IOUPAJC4YFNDLQVIOBYQGUWVLA",
    ],
)
def test_what_is_no_account_seed_is_refused(seed: str) -> None:
    with pytest.raises(Invalid):
        Issuer(seed)


def test_a_token_that_its_issuer_did_not_sign_is_refused() -> None:
    mine, other = Issuer(_SEED), Issuer(nkeys.new_account_seed())
    head, claims, signature = mine.sign({"sub": "x"}).split(".")
    foreign = other.sign({"sub": "x"}).split(".")
    for token in (
        "",
        "a.b",
        "a.b.c",
        f"{head}.{claims}.",
        f"{head}.{foreign[1]}.{signature}",
        f"{head}.e30.{signature}",
    ):
        with pytest.raises(Invalid):
            nkeys.read(token.encode())

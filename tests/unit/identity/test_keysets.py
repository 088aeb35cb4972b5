"""When a provider's keys are fetched, how long they count, and what happens when it is away."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from joserfc.jwk import ECKey, Key, RSAKey

from penstock.identity.errors import ProviderUnavailable
from penstock.identity.fetch import fetch_json, is_safe
from penstock.identity.keysets import FRESH_S, LOOK_AGAIN_S, RETRY_S, STALE_MAX_S, KeySets
from penstock.identity.tokens import Outline
from penstock.kit.errors import Unauthenticated

ISSUER = "https://id.example"
OLD = RSAKey.generate_key(2048, {"kid": "old"})
NEW = RSAKey.generate_key(2048, {"kid": "new"})
EC = ECKey.generate_key("P-256", {"kid": "ec"})


class Site:
    """A provider, and the time."""

    def __init__(self, *keys: Key) -> None:
        self.now = 1000.0
        self.keys = [key.as_dict(private=False) for key in keys]
        self.issuer = ISSUER
        self.away = False
        self.fetches = 0
        self.sets = KeySets(self.fetch, clock=lambda: self.now)

    async def fetch(self, url: str) -> Mapping[str, Any]:
        await asyncio.sleep(0)
        if self.away:
            raise OSError("away")
        if url == f"{ISSUER}/.well-known/openid-configuration":
            return {"issuer": self.issuer, "jwks_uri": f"{ISSUER}/jwks"}
        self.fetches += 1
        return {"keys": self.keys}

    async def find(self, key_id: str | None = "old", algorithm: str = "RS256") -> str | None:
        return (await self.sets.find(Outline(ISSUER, key_id, algorithm))).kid


async def test_keys_are_kept_for_five_minutes() -> None:
    site = Site(OLD)
    assert FRESH_S == 300
    for _ in range(10):
        assert await site.find() == "old"
    site.now += FRESH_S - 1
    await site.find()
    assert site.fetches == 1
    site.now += 1
    await site.find()
    assert site.fetches == 2


async def test_many_at_once_make_one_fetch() -> None:
    site = Site(OLD)
    await asyncio.gather(*(site.find() for _ in range(50)))
    assert site.fetches == 1


async def test_a_new_key_is_found_at_once_and_the_old_one_is_dropped() -> None:
    site = Site(OLD)
    await site.find()
    site.keys = [NEW.as_dict(private=False)]
    assert await site.find("new") == "new"
    with pytest.raises(Unauthenticated):
        await site.find("old")


async def test_strangers_cannot_make_us_ask_often() -> None:
    site = Site(OLD)
    await site.find()
    for number in range(100):
        with pytest.raises(Unauthenticated, match="not one of its issuer's"):
            await site.find(f"made-up-{number}")
    assert site.fetches == 2
    site.now += LOOK_AGAIN_S
    with pytest.raises(Unauthenticated):
        await site.find("made-up")
    assert site.fetches == 3
    assert await site.find("old") == "old"


async def test_known_keys_outlive_an_outage_for_an_hour() -> None:
    site = Site(OLD)
    await site.find()
    site.away = True
    site.now += STALE_MAX_S - 1
    assert await site.find() == "old"
    site.now += 1 + RETRY_S
    with pytest.raises(ProviderUnavailable) as caught:
        await site.find()
    assert caught.value.retry_after_s == RETRY_S
    site.away, site.now = False, site.now + RETRY_S
    assert await site.find() == "old"


async def test_a_provider_that_is_away_is_not_asked_all_the_time() -> None:
    site = Site(OLD)
    site.away = True
    with pytest.raises(ProviderUnavailable):
        await site.find()
    site.away = False
    with pytest.raises(ProviderUnavailable):
        await site.find()
    assert site.fetches == 0
    site.now += RETRY_S
    assert await site.find() == "old"


async def test_while_one_fetches_the_others_go_on() -> None:
    site = Site(OLD)
    await site.find()
    site.now += FRESH_S
    gate = asyncio.Event()
    answer = site.fetch

    async def slow(url: str) -> Mapping[str, Any]:
        await gate.wait()
        return await answer(url)

    site.sets._fetch = slow  # pyright: ignore[reportPrivateUsage]
    waiting = asyncio.create_task(site.find())
    await asyncio.sleep(0)
    assert await asyncio.wait_for(site.find(), 1) == "old"
    gate.set()
    assert await waiting == "old"


async def test_another_issuers_document_is_not_believed() -> None:
    site = Site(OLD)
    site.issuer = ISSUER + "/"
    with pytest.raises(ProviderUnavailable):
        await site.find()


@pytest.mark.parametrize("keys", [None, "x", [1], {"a": 1}])
async def test_a_key_set_that_makes_no_sense_is_an_outage(keys: Any) -> None:
    site = Site()
    site.keys = keys
    with pytest.raises(ProviderUnavailable):
        await site.find()


async def test_keys_that_may_not_sign_are_not_there() -> None:
    site = Site(EC)
    site.keys += [
        {"kty": "oct", "k": "c2VjcmV0", "kid": "shared"},
        {"kty": "RSA", "kid": "broken", "n": "?", "e": "AQAB"},
        NEW.as_dict(private=False) | {"use": "enc"},
        OLD.as_dict(private=False) | {"alg": "PS256"},
    ]
    for key_id in ("shared", "broken", "new", "old"):
        with pytest.raises(Unauthenticated):
            await site.find(key_id)
    assert await site.find("old", "PS256") == "old"
    assert await site.find("ec", "ES256") == "ec"
    with pytest.raises(Unauthenticated):
        await site.find("ec", "RS256")


async def test_a_token_without_a_key_id_needs_a_single_key() -> None:
    assert await Site(OLD, EC).find(None) == "old"
    with pytest.raises(Unauthenticated):
        await Site(OLD, NEW).find(None)


@pytest.mark.parametrize("url", ["https://id.example", "https://10.0.0.7/x", "http://127.0.0.1:80", "http://[::1]/"])
def test_safe_addresses(url: str) -> None:
    assert is_safe(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://id.example",
        "http://10.0.0.7",
        "file:///etc/passwd",
        "https://a@b",
        "https://",
        "x",
        "https://[::1",
        "https://a\n",
    ],
)
async def test_unsafe_addresses(url: str) -> None:
    assert not is_safe(url)
    with pytest.raises(ValueError, match="https"):
        await fetch_json(url)

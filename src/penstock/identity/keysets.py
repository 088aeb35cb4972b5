"""The keys that identity providers sign with: found by discovery, kept for a while, fetched again on rotation.

Keys are used for `FRESH_S` and then fetched again, so that a withdrawn key is out. While a provider cannot be reached,
what is known goes on to count for at most `STALE_MAX_S`. A token with an unknown key makes us look once, and not again
within `LOOK_AGAIN_S`, so that strangers cannot turn us against a provider.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from joserfc.errors import JoseError
from joserfc.jwk import Key, RSAKey, import_key

from penstock.identity.errors import ProviderUnavailable
from penstock.identity.tokens import Outline
from penstock.kit.errors import Unauthenticated
from penstock.kit.telemetry import logger

FRESH_S: Final = 300.0
STALE_MAX_S: Final = 3600.0
LOOK_AGAIN_S: Final = 10.0
RETRY_S: Final = 5.0
_KEYS_MAX: Final = 100
_ISSUERS_MAX: Final = 100
_RSA_BITS_MIN: Final = 2048
_SUFFIX: Final = "/.well-known/openid-configuration"

#: The JSON object at a URL, or an OSError or ValueError that says why not.
Fetch = Callable[[str], Awaitable[Mapping[str, Any]]]

_log = logger(__name__)


@dataclass(slots=True)
class _Known:
    """What is known of one issuer. Times are of the monotonic clock."""

    lock: asyncio.Lock
    keys: list[Key]
    fetched_at: float = float("-inf")
    failed_at: float = float("-inf")
    looked_at: float = float("-inf")


class KeySets:
    """Public keys by issuer."""

    def __init__(self, fetch: Fetch, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._fetch = fetch
        self._clock = clock
        self._known: dict[str, _Known] = {}

    async def find(self, token: Outline) -> Key:
        """The key that the token names; Unauthenticated if its issuer has none such, ProviderUnavailable if that cannot
        be told now. The issuer is a configured one: whoever calls has checked."""
        known = self._issuer(token.issuer)
        key = self._at_hand(known, token)
        if key is None:
            async with known.lock:
                key = await self._look(known, token)
        if key is None:
            raise Unauthenticated("the token's key is not one of its issuer's")
        return key

    def _at_hand(self, known: _Known, token: Outline) -> Key | None:
        """A key that counts now. While one caller fetches, the others go on with what is known."""
        age_s = self._clock() - known.fetched_at
        usable = age_s < FRESH_S or (known.lock.locked() and age_s < STALE_MAX_S)
        return _choose(known.keys, token) if usable else None

    async def _look(self, known: _Known, token: Outline) -> Key | None:
        if self._clock() - known.fetched_at >= FRESH_S:
            await self._refresh(token.issuer, known)
        key = _choose(known.keys, token)
        if key is None and self._clock() - known.looked_at >= LOOK_AGAIN_S:
            known.looked_at = self._clock()
            await self._refresh(token.issuer, known)
            key = _choose(known.keys, token)
        return key

    def _issuer(self, issuer: str) -> _Known:
        if issuer not in self._known:
            if len(self._known) >= _ISSUERS_MAX:
                self._known.clear()
            self._known[issuer] = _Known(asyncio.Lock(), [])
        return self._known[issuer]

    async def _refresh(self, issuer: str, known: _Known) -> None:
        """Fetch anew; what was known before stays in use for a while when that fails."""
        now = self._clock()
        if now - known.failed_at >= RETRY_S and await self._fetched(issuer, known):
            return
        if now - known.fetched_at >= STALE_MAX_S:
            known.keys = []
            raise ProviderUnavailable("the identity provider cannot be reached; try again", retry_after_s=int(RETRY_S))

    async def _fetched(self, issuer: str, known: _Known) -> bool:
        try:
            known.keys = _keys(await self._key_set(issuer))
        except (OSError, ValueError, msgspec.ValidationError) as error:
            known.failed_at = self._clock()
            _log.warning("identity_provider_unreachable", issuer=issuer, error=str(error) or repr(error))
            return False
        known.fetched_at = self._clock()
        return True

    async def _key_set(self, issuer: str) -> Mapping[str, Any]:
        found = await self._fetch(issuer.rstrip("/") + _SUFFIX)
        if found.get("issuer") != issuer:
            raise ValueError(f"the discovery document names another issuer: {found.get('issuer')!r}")
        return await self._fetch(msgspec.convert(found.get("jwks_uri"), str))


def _keys(document: Mapping[str, Any]) -> list[Key]:
    """Those that may sign; a key that we cannot read is not there."""
    listed = msgspec.convert(document.get("keys"), list[dict[str, Any]])[:_KEYS_MAX]
    return [key for raw in listed if (key := _key(raw)) is not None]


def _key(raw: dict[str, Any]) -> Key | None:
    if raw.get("use", "sig") != "sig" or raw.get("kty") not in {"RSA", "EC", "OKP"}:
        return None
    try:
        key = import_key(raw)
    except (JoseError, ValueError, TypeError, KeyError):
        return None
    weak = isinstance(key, RSAKey) and key.public_key.key_size < _RSA_BITS_MIN
    return None if weak else key


def _choose(keys: list[Key], token: Outline) -> Key | None:
    """The key of the named id, or the only one where none is named; never one for another algorithm."""
    fitting = [
        key
        for key in keys
        if key.key_type == token.key_type
        and key.get("alg") in (None, token.algorithm)
        and token.key_id in (None, key.kid)
    ]
    return fitting[0] if len(fitting) == 1 else None

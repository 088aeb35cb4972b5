"""Reads and checks tokens of identity providers. Pure: keys and time are given.

Nothing of a token is believed before its signature was checked with a key of its own issuer, under an algorithm of
`ALGORITHMS`; only the name of that issuer is read before, to find the keys.
"""

import base64
import binascii
import warnings
from dataclasses import dataclass
from typing import Any, Final, cast

import msgspec
from joserfc import jws
from joserfc.errors import JoseError
from joserfc.jwk import Key

from penstock.identity.errors import TokenExpired
from penstock.identity.model import Claims, Provider
from penstock.kit.errors import Unauthenticated
from penstock.wire.unreadable import UNREADABLE

TOKEN_BYTES_MAX: Final = 16_384
LEEWAY_S: Final = 60.0
#: Asymmetric only: with a shared secret, whoever can check a token could also make one.
ALGORITHMS: Final = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519"}
)
_KEY_TYPES: Final = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
#: Plain tokens and access tokens of RFC 9068. Others, such as logout tokens, are made for something else.
_TYPES: Final = frozenset({"jwt", "at+jwt", "application/jwt", "application/at+jwt"})
_TEXT_CHARS_MAX: Final = 255
_NAME_CHARS_MAX: Final = 120


class _Registry(jws.JWSRegistry):
    max_header_length = 4096
    max_payload_length = TOKEN_BYTES_MAX


_REGISTRY: Final = _Registry(algorithms=sorted(ALGORITHMS), strict_check_header=False)


@dataclass(frozen=True, slots=True)
class Outline:
    """What is read of a token before it is checked: enough to find the key that checks it."""

    issuer: str
    key_id: str | None
    algorithm: str

    @property
    def key_type(self) -> str:
        """The kind of key that the algorithm wants."""
        return _KEY_TYPES[self.algorithm[:2]]


def outline(token: str) -> Outline:
    """Who claims to have made the token, and with which key; or Unauthenticated."""
    if len(token) > TOKEN_BYTES_MAX:
        raise Unauthenticated(f"the token is longer than {TOKEN_BYTES_MAX} bytes")
    parts = token.split(".")
    if len(parts) != 3:
        raise Unauthenticated("the token is not valid")
    header, claims = _object(parts[0]), _object(parts[1])
    algorithm, key_id = header.get("alg"), header.get("kid")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise Unauthenticated("the token's signature algorithm is not allowed")
    if not _type_allowed(header) or "crit" in header or not isinstance(key_id, str | None):
        raise Unauthenticated("the token is of a kind that is not taken here")
    return Outline(_text(claims, "iss"), key_id, algorithm)


def _type_allowed(header: dict[str, Any]) -> bool:
    kind = header.get("typ", "JWT")
    return isinstance(kind, str) and kind.lower() in _TYPES


def _object(part: str) -> dict[str, Any]:
    try:
        raw = base64.b64decode(part.encode("ascii") + b"=" * (-len(part) % 4), altchars=b"-_", validate=True)
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (ValueError, binascii.Error, *UNREADABLE) as error:
        raise Unauthenticated("the token is not valid") from error


def verify(token: str, key: Key, provider: Provider, *, now: float) -> Claims:
    """What the token says, if the key made it, for this cloud, and its time is now."""
    try:
        with warnings.catch_warnings():
            # The name EdDSA is deprecated in favour of Ed25519; providers still use it.
            warnings.simplefilter("ignore")
            signed = jws.deserialize_compact(token, key, registry=_REGISTRY)
        raw = msgspec.json.decode(signed.payload, type=dict[str, Any])
    except (JoseError, ValueError, *UNREADABLE) as error:
        raise Unauthenticated("the token is not valid") from error
    if "events" in raw:
        # A note about somebody, such as a logout, that does not say so in its header.
        raise Unauthenticated("the token is of a kind that is not taken here")
    _check_time(raw, now)
    _check_audience(raw, provider)
    if _text(raw, "iss") != provider.issuer:
        raise Unauthenticated("the token's issuer is not known here")
    return _claims(raw, provider)


def _check_time(raw: dict[str, Any], now: float) -> None:
    expires, begins, made = (_seconds(raw, name) for name in ("exp", "nbf", "iat"))
    if expires is None:
        raise Unauthenticated("the token has no expiry")
    if expires + LEEWAY_S <= now:
        raise TokenExpired("token expired")
    if max(begins or 0.0, made or 0.0) > now + LEEWAY_S:
        raise Unauthenticated("the token is not valid yet")


def _seconds(raw: dict[str, Any], name: str) -> float | None:
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e12:
        raise Unauthenticated(f"the token's {name} is not a time")
    return float(value)


def _check_audience(raw: dict[str, Any], provider: Provider) -> None:
    """`aud` says whom the token is for, `azp` who asked for it; both must be us, or configured."""
    if not provider.accepted.intersection(_texts(raw.get("aud"))):
        raise Unauthenticated("the token was made for another audience")
    asked_by = raw.get("azp")
    if asked_by is not None and not (isinstance(asked_by, str) and asked_by in provider.accepted):
        raise Unauthenticated("the token was made for another audience")


def _claims(raw: dict[str, Any], provider: Provider) -> Claims:
    subject = _text(raw, "sub")
    nonce = raw.get("nonce")
    named = (raw.get(name) for name in ("name", "preferred_username", "email"))
    name = next((text for text in named if isinstance(text, str) and text.strip()), subject)
    return Claims(
        issuer=provider.issuer,
        subject=subject,
        display_name="".join(letter if letter.isprintable() else " " for letter in name).strip()[:_NAME_CHARS_MAX],
        groups=tuple(sorted(set(_texts(raw.get(provider.groups_claim))))),
        nonce=nonce if isinstance(nonce, str) else None,
        expires=cast("float", _seconds(raw, "exp")),
        to_client=provider.client_id in _texts(raw.get("aud")),
    )


def _text(raw: dict[str, Any], name: str) -> str:
    value = raw.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= _TEXT_CHARS_MAX or not value.isprintable():
        raise Unauthenticated(f"the token's {name} is missing or not a text")
    return value


def _texts(value: object) -> list[str]:
    """A list of texts, or the only one; whatever else a claim may hold counts for nothing."""
    found = cast("list[object]", value) if isinstance(value, list) else [value]
    return [text for text in found if isinstance(text, str) and 0 < len(text) <= _TEXT_CHARS_MAX and "\0" not in text]

"""Which tokens are believed."""

import base64
import hmac
import json
from typing import Any

import pytest
from joserfc import jws
from joserfc.jwk import ECKey, Key, OKPKey, RSAKey

from penstock.identity.errors import TokenExpired
from penstock.identity.model import Claims, Provider
from penstock.identity.tokens import TOKEN_BYTES_MAX, outline, verify
from penstock.kit.errors import Unauthenticated

NOW = 1_000_000.0
ISSUER = "https://id.example"
PROVIDER = Provider(
    name="corp",
    issuer=ISSUER,
    client_id="penstock",
    client_secret="",
    audiences=["api"],
    scopes=["openid"],
    groups_claim="groups",
    session_s=600,
    enabled=True,
)
CLAIMS = {"iss": ISSUER, "sub": "4711", "aud": "penstock", "exp": NOW + 600, "iat": NOW}
RSA = RSAKey.generate_key(2048)


def signed(key: Key = RSA, header: dict[str, Any] | None = None, **claims: Any) -> str:
    given = {name: value for name, value in (CLAIMS | claims).items() if value is not None}
    head = {"alg": "RS256"} | (header or {})
    return jws.serialize_compact(head, json.dumps(given).encode(), key, algorithms=[head["alg"]])


def believed(token: str, key: Key = RSA) -> Claims:
    outline(token)
    return verify(token, key, PROVIDER, now=NOW)


@pytest.mark.filterwarnings("ignore:EdDSA")
@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        ("RS256", RSA),
        ("PS256", RSA),
        ("ES256", ECKey.generate_key("P-256")),
        ("ES384", ECKey.generate_key("P-384")),
        ("EdDSA", OKPKey.generate_key("Ed25519")),
        ("Ed25519", OKPKey.generate_key("Ed25519")),
    ],
)
def test_asymmetric_signatures_are_believed(algorithm: str, key: Key) -> None:
    token = signed(key, {"alg": algorithm})
    assert outline(token).key_type == key.key_type
    assert believed(token, key).subject == "4711"


def test_what_a_token_says_about_a_person() -> None:
    claims = believed(signed(name="Ada\n\u202eL", groups=["b", "a", "a", 3, None, ""], nonce="n"))
    assert claims == Claims(
        issuer=ISSUER, subject="4711", display_name="Ada  L", groups=("a", "b"), nonce="n", expires=NOW + 600
    )
    assert believed(signed(preferred_username="ada")).display_name == "ada"
    assert believed(signed(name=" ")).display_name == "4711"
    assert believed(signed(groups="only")).groups == ("only",)
    assert believed(signed(groups={"a": 1})).groups == ()


@pytest.mark.parametrize("audience", ["penstock", "api", ["x", "api"]])
def test_tokens_for_us_are_taken(audience: Any) -> None:
    believed(signed(aud=audience))
    believed(signed(aud=audience, azp="penstock"))
    assert believed(signed(aud=audience)).to_client is (audience == "penstock")


@pytest.mark.parametrize("ahead_s", [{"exp": NOW - 59}, {"nbf": NOW + 59}, {"iat": NOW + 59}])
def test_clocks_may_differ_by_a_minute(ahead_s: dict[str, float]) -> None:
    believed(signed(**ahead_s))


@pytest.mark.parametrize("exp", [NOW - 60, NOW - 3600, 0])
def test_a_token_ends(exp: float) -> None:
    with pytest.raises(TokenExpired, match="token expired"):
        believed(signed(exp=exp))


@pytest.mark.parametrize(
    ("claims", "says"),
    [
        ({"aud": "other"}, "another audience"),
        ({"aud": None}, "another audience"),
        ({"aud": []}, "another audience"),
        ({"aud": {"penstock": 1}}, "another audience"),
        ({"aud": ["penstock", "other"], "azp": "other"}, "another audience"),
        ({"azp": ["penstock"]}, "another audience"),
        ({"events": {"http://schemas.openid.net/event/backchannel-logout": {}}}, "kind that is not taken"),
        ({"iss": "https://id.example/"}, "issuer"),
        ({"iss": None}, "iss"),
        ({"exp": None}, "expiry"),
        ({"exp": "soon"}, "not a time"),
        ({"exp": True}, "not a time"),
        ({"exp": 1e300}, "not a time"),
        ({"nbf": NOW + 61}, "not valid yet"),
        ({"iat": NOW + 61}, "not valid yet"),
        ({"sub": None}, "sub"),
        ({"sub": ""}, "sub"),
        ({"sub": 4711}, "sub"),
        ({"sub": "a\0b"}, "sub"),
        ({"sub": "s" * 256}, "sub"),
    ],
)
def test_claims_that_are_not_for_us_or_make_no_sense(claims: dict[str, Any], says: str) -> None:
    with pytest.raises(Unauthenticated, match=says):
        believed(signed(**claims))


@pytest.mark.parametrize(
    "header",
    [{"typ": "logout+jwt"}, {"typ": "dpop+jwt"}, {"typ": 1}, {"kid": 7}],
)
def test_other_kinds_of_tokens_are_refused(header: dict[str, Any]) -> None:
    head, _, rest = signed().partition(".")
    raw = json.loads(base64.urlsafe_b64decode(head + "==")) | header
    forged = base64.urlsafe_b64encode(json.dumps(raw).encode()).rstrip(b"=").decode()
    with pytest.raises(Unauthenticated, match="kind"):
        outline(f"{forged}.{rest}")


@pytest.mark.parametrize("algorithm", ["none", "HS256", "HS384", "HS512", "ES256K", "rs256", "", None, 1])
def test_only_algorithms_of_the_list_count(algorithm: Any) -> None:
    head = base64.urlsafe_b64encode(json.dumps({"alg": algorithm}).encode()).rstrip(b"=").decode()
    with pytest.raises(Unauthenticated, match="algorithm"):
        outline(f"{head}.{signed().split('.')[1]}.x")


def test_a_public_key_is_no_shared_secret() -> None:
    parts = ({"alg": "HS256"}, CLAIMS)
    body = ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts)
    mac = hmac.digest(RSA.as_pem(private=False), body.encode(), "sha256")
    token = f"{body}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"
    for check in (outline, lambda token: verify(token, RSA, PROVIDER, now=NOW)):
        with pytest.raises(Unauthenticated):
            check(token)


def test_another_key_or_a_changed_claim_is_found() -> None:
    with pytest.raises(Unauthenticated, match="not valid"):
        believed(signed(RSAKey.generate_key(2048)))
    head, payload, signature = signed().split(".")
    changed = json.loads(base64.urlsafe_b64decode(payload + "==")) | {"sub": "root"}
    forged = base64.urlsafe_b64encode(json.dumps(changed).encode()).rstrip(b"=").decode()
    with pytest.raises(Unauthenticated, match="not valid"):
        believed(f"{head}.{forged}.{signature}")


@pytest.mark.parametrize(
    "token",
    ["", "..", "a.b.c", "a.b", "a.b.c.d", "e30.e30.e30", "W10.W10.", "\u00e9.b.c", "[" * 900 + ".b.c", "=.=.="],
)
def test_no_garbage_breaks_the_reader(token: str) -> None:
    with pytest.raises(Unauthenticated):
        outline(token)


def test_deep_nesting_is_refused() -> None:
    deep = base64.urlsafe_b64encode(b"[" * 5000).rstrip(b"=").decode()
    with pytest.raises(Unauthenticated):
        outline(f"{deep}.{deep}.")


def test_a_token_has_a_largest_size() -> None:
    with pytest.raises(Unauthenticated, match="longer than"):
        outline("a" * (TOKEN_BYTES_MAX + 1))
    believed(signed(groups=["g" * 200] * 50))

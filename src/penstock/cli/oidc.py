"""Speaks with an identity provider on behalf of a person at a terminal: PKCE in a browser, or the device flow.

Answers are bounded in size and time, redirects are not followed, and nothing goes unencrypted except to this machine.
"""

import base64
import hashlib
import http.client
import json
import secrets
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast
from urllib.parse import parse_qs, urlencode, urlsplit

from penstock.cli.errors import AUTH, SERVER, CliError

TIMEOUT_S: Final = 15.0
BYTES_MAX: Final = 1 << 20
#: The longest that a person is waited for.
PATIENCE_S: Final = 300.0
_INTERVAL_S: Final = 5.0
_SLOWER_S: Final = 5.0
_INTERVAL_MAX_S: Final = 60.0
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_DEVICE_GRANT: Final = "urn:ietf:params:oauth:grant-type:device_code"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """A provider and our client there; what its discovery document says about itself."""

    issuer: str
    client_id: str
    client_secret: str
    scopes: tuple[str, ...]
    authorization_endpoint: str
    token_endpoint: str
    device_endpoint: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One login in a browser. Whoever brings the code must show that they began it (`verifier`), the answer must be to
    our question (`state`), and the token must be of this login (`nonce`)."""

    redirect_uri: str
    state: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    nonce: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    verifier: str = field(default_factory=lambda: secrets.token_urlsafe(48), repr=False)

    def url(self, provider: Provider) -> str:
        """Where the person logs in."""
        challenge = base64.urlsafe_b64encode(hashlib.sha256(self.verifier.encode()).digest()).rstrip(b"=").decode()
        asked = {
            "response_type": "code",
            "client_id": provider.client_id,
            "redirect_uri": self.redirect_uri,
            "scope": " ".join(provider.scopes),
            "state": self.state,
            "nonce": self.nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        joint = "&" if urlsplit(provider.authorization_endpoint).query else "?"
        return provider.authorization_endpoint + joint + urlencode(asked)

    def code(self, query: str, provider: Provider) -> str:
        """The code in what the provider sent back, or a CliError: another's answer, or a refusal."""
        answer = {name: values[0] for name, values in parse_qs(query).items()}
        if not secrets.compare_digest(answer.get("state", "").encode(), self.state.encode()):
            raise failed("the answer is not to this login (state mismatch); nothing was stored")
        if answer.get("iss", provider.issuer) != provider.issuer:
            raise failed("the answer comes from another identity provider; nothing was stored")
        _refused(answer)
        if not answer.get("code"):
            raise failed("the identity provider sent no code")
        return answer["code"]


def failed(message: str) -> CliError:
    """A login that did not come about."""
    return CliError(message, code="login_failed", exit_code=AUTH)


def discover(issuer: str, *, client_id: str, client_secret: str, scopes: tuple[str, ...]) -> Provider:
    """Ask the provider about itself."""
    found = _send(issuer.rstrip("/") + "/.well-known/openid-configuration")
    if found.get("issuer") != issuer:
        raise failed(f"{issuer} says that it is another issuer")
    return Provider(
        issuer=issuer,
        client_id=client_id,
        client_secret=client_secret,
        scopes=scopes,
        authorization_endpoint=_address(found, "authorization_endpoint"),
        token_endpoint=_address(found, "token_endpoint"),
        device_endpoint=_address(found, "device_authorization_endpoint")
        if found.get("device_authorization_endpoint")
        else None,
    )


def _address(found: Mapping[str, Any], name: str) -> str:
    value = found.get(name)
    if not isinstance(value, str):
        raise failed(f"the identity provider names no {name}")
    _check(value)
    return value


def redeem(provider: Provider, attempt: Attempt, code: str) -> str:
    """The ID token for a code."""
    form = {"grant_type": "authorization_code", "code": code, "redirect_uri": attempt.redirect_uri}
    return _id_token(_send(provider.token_endpoint, _form(provider, code_verifier=attempt.verifier, **form)))


def by_device(
    provider: Provider, show: Callable[[str, str], None], *, sleep: Callable[[float], None] = time.sleep
) -> str:
    """The ID token of a person who logs in on another device. `show` tells them the address and the code."""
    assert provider.device_endpoint is not None
    begun = _send(provider.device_endpoint, _form(provider, scope=" ".join(provider.scopes)))
    _refused(begun)
    device_code, user_code = (_text(begun, name) for name in ("device_code", "user_code"))
    show(str(begun.get("verification_uri_complete") or _text(begun, "verification_uri")), user_code)
    interval_s = _number(begun.get("interval"), _INTERVAL_S)
    deadline = time.monotonic() + min(PATIENCE_S, _number(begun.get("expires_in"), PATIENCE_S))
    form = _form(provider, grant_type=_DEVICE_GRANT, device_code=device_code)
    while time.monotonic() + interval_s < deadline:
        sleep(interval_s)
        answer = _send(provider.token_endpoint, form)
        match answer.get("error"):
            case "authorization_pending":
                continue
            case "slow_down":
                interval_s = min(_INTERVAL_MAX_S, interval_s + _SLOWER_S)
            case "expired_token":
                break
            case _:
                return _id_token(answer)
    raise failed("nobody confirmed the login in time")


def _form(provider: Provider, **fields: str) -> bytes:
    client = {"client_id": provider.client_id}
    if provider.client_secret:
        client["client_secret"] = provider.client_secret
    return urlencode(client | fields).encode()


def _id_token(answer: Mapping[str, Any]) -> str:
    _refused(answer)
    return _text(answer, "id_token")


def _refused(answer: Mapping[str, Any]) -> None:
    if "error" in answer:
        raise failed(f"the identity provider refused: {_words(answer)}")


def _words(answer: Mapping[str, Any]) -> str:
    return " ".join(str(answer[name])[:200] for name in ("error", "error_description") if answer.get(name))


def _text(answer: Mapping[str, Any], name: str) -> str:
    value = answer.get(name)
    if not isinstance(value, str) or not value:
        raise failed(f"the identity provider's answer has no {name}")
    return value


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value <= 86_400 else default


class _AnyAnswer(urllib.request.HTTPErrorProcessor):
    """Any answer is an answer, also one that points elsewhere."""

    def http_response(self, request: urllib.request.Request, response: Any) -> Any:  # noqa: ARG002
        return response

    https_response = http_response


def _check(url: str) -> None:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise failed(f"the identity provider's address {url[:200]!r} is not one") from error
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
        raise failed(f"the identity provider's address {url[:200]!r} is not encrypted")


def _send(url: str, form: bytes | None = None) -> dict[str, Any]:
    """The provider's JSON: an answer, or its error."""
    _check(url)
    headers = {"Accept": "application/json", "User-Agent": "penstock"}
    request = urllib.request.Request(url, data=form, headers=headers)  # noqa: S310 (checked above)
    opener = urllib.request.build_opener(_AnyAnswer)
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            if answer.status not in (200, 400, 401, 403):
                raise _unusable(url, f"it answered {answer.status}")
            return _decoded(answer.read(BYTES_MAX + 1))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _unusable(url, str(getattr(error, "reason", error)) or type(error).__name__) from error


def _unusable(url: str, reason: str) -> CliError:
    host = urlsplit(url).netloc
    return CliError(f"cannot use the identity provider at {host}: {reason}", code="provider", exit_code=SERVER)


def _decoded(body: bytes) -> dict[str, Any]:
    if len(body) > BYTES_MAX:
        raise ValueError(f"the answer is larger than {BYTES_MAX} bytes")
    try:
        found = json.loads(body)
    except RecursionError as error:
        raise ValueError("the answer is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("the answer is not a JSON object")  # noqa: TRY004 (what the server sent, not our types)
    return cast("dict[str, Any]", found)

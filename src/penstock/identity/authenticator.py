"""Who a request comes from, decided by its bearer credential.

An answer is kept for at most `KEPT_S`, and forgotten at once when anything is revoked, so a revoked key is out within
seconds even if the hint was lost. Refusals are never kept.
"""

import base64
import hashlib
import time
from typing import Final, TypeVar

import msgspec

from penstock.identity import store
from penstock.identity.errors import KeyBound, TokenExpired
from penstock.identity.model import ACTIONS, Credential, PrincipalKind, Role, actions
from penstock.kit.bus import Bus
from penstock.kit.caller import Caller
from penstock.kit.clock import utc_now
from penstock.kit.db import Database
from penstock.kit.errors import NotFound, Unauthenticated
from penstock.wire import subjects

K = TypeVar("K")
V = TypeVar("V")

KEPT_S: Final = 2.0
CACHE_ENTRIES_MAX: Final = 10_000
TOUCH_EVERY_S: Final = 60.0
KEY_PREFIX: Final = "psk_"
_KEY_CHARACTERS: Final = len(KEY_PREFIX) + 43
_LEEWAY_S: Final = 60


def digest(secret: str) -> bytes:
    """What is stored of a key."""
    return hashlib.sha256(secret.encode()).digest()


class Authenticator:
    """Looks credentials up, with a short memory."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._callers: dict[tuple[bytes, str | None], tuple[float, Caller]] = {}
        self._valid: dict[str, float] = {}
        self._used: set[str] = set()

    async def watch(self, bus: Bus) -> None:
        """Forget everything whenever something is revoked."""
        await bus.on_hint(subjects.REVOKED, self._forget)

    async def _forget(self, _: str, __: bytes) -> None:
        self._callers.clear()
        self._valid.clear()

    async def authenticate(self, authorization: str | None, project: str | None) -> Caller:
        """The caller behind an Authorization header, acting in `project` or the key's own."""
        secret = _bearer(authorization)
        cached = (digest(secret), project)
        found = self._callers.get(cached)
        if found is not None and found[0] > time.monotonic():
            return found[1]
        credential = await self._find(cached[0], project)
        caller = resolve(credential, project)
        _keep(self._callers, cached, (_deadline(credential), caller))
        self._used.add(credential.key_id)
        return caller

    async def _find(self, key_digest: bytes, project: str | None) -> Credential:
        async with self._db.read() as conn:
            credential = await store.find_credential(conn, key_digest, project)
        if credential is None:
            raise Unauthenticated("the API key is not valid")
        return credential

    async def still_valid(self, key_id: str) -> bool:
        """Whether a key that was valid when a long exchange began still is."""
        if self._valid.get(key_id, 0.0) > time.monotonic():
            return True
        async with self._db.read() as conn:
            credential = await store.find_credential_by_id(conn, key_id)
        if credential is None:
            return False
        _keep(self._valid, key_id, _deadline(credential))
        return True

    async def touch(self) -> None:
        """Write down which keys were used; called once a minute, away from requests."""
        if not self._used:
            return
        used, self._used = self._used, set()
        async with self._db.transaction() as tx:
            await store.touch_keys(tx, sorted(used))


def resolve(credential: Credential, project: str | None) -> Caller:
    """The caller of a valid key. Another project than the key's own is open to operators, and to owners' own keys
    within the organisation where they are members."""
    operator = credential.operator and credential.key_role is Role.OWNER
    if project is None or project == credential.key_project_id:
        return _caller(credential, credential.key_member_role, credential.key_role, operator=operator)
    if operator:
        if credential.project_id is None:
            raise NotFound("no project with this id", field="Penstock-Project")
        return _caller(credential, Role.OWNER, Role.OWNER, operator=True)
    if credential.member_role is None or not _roams(credential):
        raise KeyBound("this API key works in its own project only", field="Penstock-Project")
    return _caller(credential, credential.member_role, credential.member_role, operator=False)


def _roams(credential: Credential) -> bool:
    return (
        credential.principal_kind == PrincipalKind.USER
        and credential.key_role is Role.OWNER
        and credential.key_member_role is Role.OWNER
        and credential.organisation_id == credential.key_organisation_id
    )


def _caller(credential: Credential, member: Role, key: Role, *, operator: bool) -> Caller:
    """What membership and key allow together."""
    assert credential.project_id is not None
    assert credential.organisation_id is not None
    return Caller(
        principal_id=credential.principal_id,
        principal_kind=credential.principal_kind,
        display_name=credential.display_name,
        organisation_id=credential.organisation_id,
        project_id=credential.project_id,
        role=key if ACTIONS[key] <= ACTIONS[member] else member,
        actions=actions(key, operator=operator) & actions(member, operator=operator),
        operator=operator,
        key_id=credential.key_id,
    )


def _deadline(credential: Credential) -> float:
    remaining_s = KEPT_S if credential.remaining_s is None else min(KEPT_S, credential.remaining_s)
    return time.monotonic() + remaining_s


def _keep(cache: dict[K, V], key: K, value: V) -> None:
    if len(cache) >= CACHE_ENTRIES_MAX:
        cache.clear()
    cache[key] = value


def _bearer(authorization: str | None) -> str:
    """The API key in the header, or Unauthenticated in words that help."""
    scheme, _, token = (authorization or "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise Unauthenticated("send an API key: Authorization: Bearer psk_…")
    if token.startswith(KEY_PREFIX) and len(token) == _KEY_CHARACTERS and token.isascii():
        return token
    if token.count(".") == 2:
        _refuse_jwt(token)
    raise Unauthenticated("the API key is not valid")


def _refuse_jwt(token: str) -> None:
    """No identity provider is configured, so no token is believed; a readable expiry only makes the answer clearer."""
    try:
        payload = token.split(".")[1]
        claims = msgspec.json.decode(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        expires = float(claims["exp"])
    except (ValueError, TypeError, KeyError, msgspec.DecodeError):
        return
    if expires + _LEEWAY_S < utc_now().timestamp():
        raise TokenExpired("token expired")

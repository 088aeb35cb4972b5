"""Who a request comes from, decided by its bearer credential: an API key, a session, or an identity provider's token.

An answer is kept for at most `KEPT_S`, and forgotten at once when anything is revoked, so a revoked credential is out
within seconds even if the hint was lost. Refusals are never kept.
"""

import time
from collections.abc import Callable
from typing import Final, TypeVar

from penstock.identity import store
from penstock.identity.credentials import KEY_PREFIX, SESSION_PREFIX, digest
from penstock.identity.errors import KeyBound
from penstock.identity.fetch import fetch_json
from penstock.identity.keysets import KeySets
from penstock.identity.logins import Tokens, caller_of, still_granted
from penstock.identity.model import ACTIONS, OPERATOR_ACTIONS, Credential, Person, PrincipalKind, Role, actions
from penstock.identity.store import logins
from penstock.kit.bus import Bus
from penstock.kit.caller import Caller, Login
from penstock.kit.db import Database
from penstock.kit.errors import Unauthenticated, missing
from penstock.wire import subjects

K = TypeVar("K")
V = TypeVar("V")

KEPT_S: Final = 2.0
CACHE_ENTRIES_MAX: Final = 10_000
TOUCH_EVERY_S: Final = 60.0
_SECRET_CHARACTERS: Final = 4 + 43


class Authenticator:
    """Looks credentials up, with a short memory."""

    def __init__(self, db: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._db = db
        self._clock = clock
        self.tokens = Tokens(db, KeySets(fetch_json), clock=clock)
        self._callers: dict[tuple[bytes, str | None], tuple[float, Caller]] = {}
        self._valid: dict[tuple[str, str], float] = {}
        self._used: set[str] = set()

    async def watch(self, bus: Bus) -> None:
        """Forget everything whenever something is revoked."""
        await bus.on_hint(subjects.REVOKED, self._forget)

    async def _forget(self, _: str, __: bytes) -> None:
        self._callers.clear()
        self._valid.clear()

    async def authenticate(self, authorization: str | None, project: str | None) -> Caller:
        """The caller behind an Authorization header, acting in `project` or the credential's own."""
        secret = bearer(authorization)
        cached = (digest(secret), project)
        found = self._callers.get(cached)
        if found is not None and found[0] > time.monotonic():
            return found[1]
        caller, remaining_s = await self._find(secret, cached[0], project)
        _keep(self._callers, cached, (_deadline(remaining_s), caller))
        return caller

    async def _find(self, secret: str, secret_digest: bytes, project: str | None) -> tuple[Caller, float | None]:
        """The caller, and for how long their credential still works."""
        if secret.startswith(KEY_PREFIX):
            return await self._by_key(secret_digest, project)
        if secret.startswith(SESSION_PREFIX):
            return await self._by_session(secret_digest, project)
        return await self._by_token(secret, secret_digest, project)

    async def _by_key(self, key_digest: bytes, project: str | None) -> tuple[Caller, float | None]:
        async with self._db.read() as conn:
            credential = await store.find_credential(conn, key_digest, project)
        if credential is None:
            raise Unauthenticated("the API key is not valid")
        caller = resolve(credential, project)
        self._used.add(credential.key_id)
        return caller, credential.remaining_s

    async def _by_session(self, session_digest: bytes, project: str | None) -> tuple[Caller, float | None]:
        async with self._db.read() as conn:
            found = await logins.find_login(conn, session_digest)
            if found is None:
                raise Unauthenticated("the session is over")
            person = Person(id=found.principal_id, display_name=found.display_name, disabled=False)
            login = Login(id=found.id, provider=found.provider, groups=tuple(found.groups))
            caller = await caller_of(conn, person, login, project)
        self._used.add(found.id)
        return caller, found.remaining_s

    async def _by_token(self, token: str, token_digest: bytes, project: str | None) -> tuple[Caller, float | None]:
        provider, claims = await self.tokens.check(token)
        person = await self.tokens.person(claims)
        login = Login(
            id=f"jwt_{token_digest.hex()[:26]}", provider=provider.name, groups=claims.groups, expires=claims.expires
        )
        async with self._db.read() as conn:
            caller = await caller_of(conn, person, login, project)
        return caller, max(0.0, claims.expires - self._clock())

    async def still_valid(self, caller: Caller) -> bool:
        """Whether the credential of a caller that was valid when a long exchange began still is."""
        credential_id = caller.key_id or (caller.login.id if caller.login else None)
        if credential_id is None:
            return True
        cached = (credential_id, caller.project_id)
        if self._valid.get(cached, 0.0) > time.monotonic():
            return True
        valid, remaining_s = await self._valid_now(caller)
        if valid:
            _keep(self._valid, cached, _deadline(remaining_s))
        return valid

    async def _valid_now(self, caller: Caller) -> tuple[bool, float | None]:
        async with self._db.read() as conn:
            if caller.key_id is None:
                return await still_granted(conn, caller, now=self._clock()), None
            credential = await store.find_credential_by_id(conn, caller.key_id)
        return credential is not None, credential.remaining_s if credential else None

    async def touch(self) -> None:
        """Write down which keys and sessions were used; called once a minute, away from requests."""
        if not self._used:
            return
        used, self._used = self._used, set()
        async with self._db.transaction() as tx:
            await store.touch_keys(tx, sorted(used))
            await logins.touch_sessions(tx, sorted(used))


def resolve(credential: Credential, project: str | None) -> Caller:
    """The caller of a valid key. Another project than the key's own is open to operators, and to owners' own keys
    within the organisation where they are members."""
    operator = credential.operator and credential.key_role is Role.OWNER
    if project is None or project == credential.key_project_id:
        return _caller(credential, credential.key_member_role, credential.key_role, operator=operator)
    if operator:
        if credential.project_id is None:
            raise missing("project", project, field="Penstock-Project")
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
        operators_only=OPERATOR_ACTIONS,
        key_id=credential.key_id,
    )


def _deadline(remaining_s: float | None) -> float:
    return time.monotonic() + (KEPT_S if remaining_s is None else min(KEPT_S, remaining_s))


def _keep(cache: dict[K, V], key: K, value: V) -> None:
    if len(cache) >= CACHE_ENTRIES_MAX:
        cache.clear()
    cache[key] = value


def bearer(authorization: str | None) -> str:
    """The credential in the header, or Unauthenticated in words that help."""
    scheme, _, token = (authorization or "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise Unauthenticated("send an API key: Authorization: Bearer psk_…")
    if token.startswith((KEY_PREFIX, SESSION_PREFIX)) and len(token) == _SECRET_CHARACTERS and token.isascii():
        return token
    if token.count(".") == 2 and token.isascii():
        return token
    raise Unauthenticated("the API key is not valid")

"""API keys. The secret is shown once and only its hash is kept; a key never exceeds its maker nor its owner, nor
outlives the key that it was made with."""

import secrets
from dataclasses import dataclass

from penstock.identity import store
from penstock.identity.credentials import KEY_PREFIX, digest
from penstock.identity.errors import ScopeExceedsCaller
from penstock.identity.model import ACTIONS, Key, Role
from penstock.identity.service import policy
from penstock.kit import audit, outbox
from penstock.kit.audit import Actor
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import Conflict, missing
from penstock.kit.ids import new_id
from penstock.kit.outbox import Event
from penstock.wire import subjects


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """What is asked for."""

    name: str
    role: Role
    service_account_id: str | None
    expires_in_s: int | None


async def create(tx: Tx, caller: Caller, new: NewKey) -> tuple[Key, str]:
    """A key of the caller, or of a service account, in the current project; and its secret."""
    caller.require("keys.write")
    policy.require_within(caller, new.role)
    principal_id = new.service_account_id or caller.principal_id
    if new.service_account_id is not None:
        await _require_account(tx, caller, new)
    elif await store.find_member(tx, caller.project_id, caller.principal_id) is None:
        raise Conflict("a key works for members only: become a member of the project first")
    return await mint(
        tx,
        caller.actor,
        name=new.name,
        role=new.role,
        principal_id=principal_id,
        organisation_id=caller.organisation_id,
        project_id=caller.project_id,
        expires_in_s=await _lifetime_s(tx, caller, new.expires_in_s),
    )


async def _lifetime_s(tx: Tx, caller: Caller, asked_s: float | None) -> float | None:
    """What was asked for, within what the caller's own key has left; that much when nothing was asked for."""
    left_s = await store.remaining_s(tx, caller.key_id) if caller.key_id is not None else None
    if asked_s is not None and left_s is not None and asked_s > left_s:
        raise ScopeExceedsCaller(f"expires_in_s: your own key expires in {max(0, int(left_s))} s", field="expires_in_s")
    return left_s if asked_s is None else asked_s


async def _require_account(tx: Tx, caller: Caller, new: NewKey) -> None:
    assert new.service_account_id is not None
    account = await store.find_service_account(tx, caller.project_id, new.service_account_id)
    if account is None:
        raise missing("service account", new.service_account_id, field="service_account_id")
    if not ACTIONS[new.role] <= ACTIONS[account.role]:
        raise ScopeExceedsCaller(f"role: exceeds the service account's ({account.role})", field="role")


async def mint(
    tx: Tx,
    actor: Actor,
    *,
    name: str,
    role: Role,
    principal_id: str,
    organisation_id: str,
    project_id: str,
    expires_in_s: float | None = None,
) -> tuple[Key, str]:
    """Make the key; whoever calls has checked that it may exist."""
    secret = KEY_PREFIX + secrets.token_urlsafe(32)
    key = await store.insert_key(
        tx,
        key_id=new_id("key"),
        digest=digest(secret),
        hint=secret[-4:],
        name=name,
        role=role,
        principal_id=principal_id,
        project_id=project_id,
        expires_in_s=expires_in_s,
    )
    await _record(
        tx, actor, key, organisation_id, "keys.create", _event(key, organisation_id, "identity.key_created", 1)
    )
    return key, secret


async def list_keys(conn: Reader, caller: Caller, *, after: str, limit: int) -> list[Key]:
    """Those of the current project."""
    caller.require("keys.read")
    return await store.list_keys(conn, caller.project_id, after=after, limit=limit)


async def show(conn: Reader, caller: Caller, key_id: str) -> Key:
    """One of the current project."""
    caller.require("keys.read")
    key = await store.find_key(conn, caller.project_id, key_id)
    if key is None:
        raise missing("key", key_id)
    return key


async def revoke(tx: Tx, caller: Caller, key_id: str) -> None:
    """It stops working at once; a second time changes nothing. Others' keys are for those who manage members."""
    caller.require("keys.write")
    key = await show(tx, caller, key_id)
    if key.principal_id != caller.principal_id:
        caller.require("members.write")
        policy.require_within(caller, key.role)
    if await store.revoke_key(tx, caller.project_id, key_id) is None:
        return
    event = _event(key, caller.organisation_id, "identity.key_revoked", 2)
    await _record(tx, caller.actor, key, caller.organisation_id, "keys.revoke", event)
    tx.hint(subjects.REVOKED)


def _event(key: Key, organisation_id: str, event_type: str, version: int) -> Event:
    return Event(
        type=event_type,
        aggregate_id=key.id,
        version=version,
        organisation_id=organisation_id,
        project_id=key.project_id,
        payload={"key_id": key.id, "name": key.name, "role": key.role, "principal_id": key.principal_id},
    )


async def _record(tx: Tx, actor: Actor, key: Key, organisation_id: str, action: str, event: Event) -> None:
    await audit.record(
        tx,
        actor,
        action,
        key.id,
        organisation_id=organisation_id,
        project_id=key.project_id,
        detail={"name": key.name, "role": key.role, "principal_id": key.principal_id},
    )
    await outbox.append(tx, event)

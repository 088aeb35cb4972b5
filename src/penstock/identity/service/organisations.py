"""Organisations and users: made by operators, seen within the organisation."""

from penstock.identity import store
from penstock.identity.model import Organisation, PrincipalKind, User
from penstock.identity.store import logins
from penstock.kit import audit, outbox
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import Conflict, missing
from penstock.kit.ids import new_id
from penstock.kit.outbox import Event
from penstock.wire import subjects


async def create_organisation(tx: Tx, caller: Caller, name: str) -> Organisation:
    """A new customer."""
    caller.require("organisations.write")
    made = await store.insert_organisation(tx, organisation_id=new_id("org"), name=name)
    await audit.record(
        tx, caller.actor, "organisations.create", made.id, organisation_id=made.id, detail={"name": name}
    )
    await outbox.append(
        tx,
        Event(
            type="identity.organisation_created",
            aggregate_id=made.id,
            version=1,
            organisation_id=made.id,
            project_id=None,
            payload={"organisation_id": made.id, "name": name},
        ),
    )
    return made


async def list_organisations(conn: Reader, caller: Caller, *, after: str, limit: int) -> list[Organisation]:
    """All for operators, the caller's own otherwise."""
    caller.require("organisations.read")
    only = None if caller.operator else caller.organisation_id
    return await store.list_organisations(conn, only=only, after=after, limit=limit)


async def create_user(tx: Tx, caller: Caller, *, issuer: str, subject: str, display_name: str) -> User:
    """A person; without a membership they may do nothing."""
    caller.require("users.write")
    user_id = new_id("usr")
    created_at = await store.insert_principal(
        tx, principal_id=user_id, kind=PrincipalKind.USER, display_name=display_name
    )
    await store.insert_user(tx, user_id=user_id, issuer=issuer, subject=subject)
    await audit.record(tx, caller.actor, "users.create", user_id, detail={"issuer": issuer, "subject": subject})
    await outbox.append(
        tx,
        Event(
            type="identity.user_created",
            aggregate_id=user_id,
            version=1,
            organisation_id=None,
            project_id=None,
            payload={"user_id": user_id, "display_name": display_name},
        ),
    )
    return User(id=user_id, issuer=issuer, subject=subject, display_name=display_name, created_at=created_at)


async def set_user_disabled(tx: Tx, caller: Caller, user_id: str, *, disabled: bool) -> User:
    """Shut a person out, whatever keys and sessions they have; or let them in again, to log in anew."""
    caller.require("users.write")
    if disabled and user_id == caller.principal_id:
        raise Conflict("you cannot disable yourself")
    changed = await store.set_user_disabled(tx, user_id, disabled=disabled)
    if changed is None:
        raise missing("user", user_id)
    await logins.revoke_sessions_of(tx, user_id)
    await audit.record(tx, caller.actor, "users.disable" if disabled else "users.enable", user_id)
    tx.hint(subjects.REVOKED)
    return changed


async def list_users(conn: Reader, caller: Caller, *, after: str, limit: int) -> list[User]:
    """All for operators, those in the caller's organisation otherwise."""
    caller.require("users.read")
    organisation_id = None if caller.operator else caller.organisation_id
    return await store.list_users(conn, organisation_id=organisation_id, after=after, limit=limit)

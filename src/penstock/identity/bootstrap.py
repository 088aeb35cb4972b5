"""What every install has: the default organisation and project, the platform's own, and a local administrator with a
key."""

from penstock.identity import store
from penstock.identity.model import (
    DEFAULT_ORGANISATION,
    DEFAULT_PROJECT,
    LOCAL_ADMIN,
    PLATFORM_ORGANISATION,
    PLATFORM_PROJECT,
    PrincipalKind,
    Role,
)
from penstock.identity.service import keys
from penstock.kit import audit
from penstock.kit.db import Tx
from penstock.wire import subjects


async def bootstrap(tx: Tx) -> str | None:
    """Make them once; the administrator's key is answered that one time, and none ever after."""
    await tx.execute("select pg_advisory_xact_lock(7002)")
    if await store.organisation_exists(tx, DEFAULT_ORGANISATION):
        return None
    await store.insert_organisation(tx, organisation_id=DEFAULT_ORGANISATION, name="default")
    await store.insert_project(tx, project_id=DEFAULT_PROJECT, organisation_id=DEFAULT_ORGANISATION, name="default")
    await store.insert_organisation(tx, organisation_id=PLATFORM_ORGANISATION, name="platform")
    await store.insert_project(tx, project_id=PLATFORM_PROJECT, organisation_id=PLATFORM_ORGANISATION, name="platform")
    await store.insert_principal(
        tx, principal_id=LOCAL_ADMIN, kind=PrincipalKind.USER, display_name="local admin", operator=True
    )
    await store.insert_user(tx, user_id=LOCAL_ADMIN, issuer="penstock", subject="admin")
    await store.put_member(tx, DEFAULT_PROJECT, LOCAL_ADMIN, Role.OWNER)
    return await _mint(tx)


async def reset_admin_key(tx: Tx) -> str:
    """Revoke all keys of the local administrator and make a new one."""
    await store.revoke_keys_of(tx, LOCAL_ADMIN)
    tx.hint(subjects.REVOKED)
    return await _mint(tx)


async def _mint(tx: Tx) -> str:
    _, secret = await keys.mint(
        tx,
        audit.system("bootstrap"),
        name="admin",
        role=Role.OWNER,
        principal_id=LOCAL_ADMIN,
        organisation_id=DEFAULT_ORGANISATION,
        project_id=DEFAULT_PROJECT,
    )
    return secret

"""Identity providers and what their groups may do; for operators only.

A mapping is the only thing that turns a group into a right, and each grants exactly what it says.
"""

from dataclasses import dataclass
from typing import Final

from penstock.identity import store
from penstock.identity.errors import IssuerFixed
from penstock.identity.fetch import is_safe
from penstock.identity.model import GroupMapping, Provider, Role
from penstock.identity.store import providers
from penstock.kit import audit
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import Conflict, Invalid, missing
from penstock.kit.ids import check_id, new_id
from penstock.wire import subjects

PROVIDERS_MAX: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMapping:
    """What is asked for."""

    group: str
    role: Role | None
    project_id: str | None
    organisation_id: str | None
    operator: bool


async def put(tx: Tx, caller: Caller, provider: Provider) -> Provider:
    """Make or change a provider. Its issuer stays: everyone who logged in is known by it."""
    caller.require("providers.write")
    if not is_safe(provider.issuer):
        raise Invalid("issuer: must begin with https:// (http:// only on this machine)", field="issuer")
    if "openid" not in provider.scopes:
        raise Invalid("scopes: must contain openid", field="scopes")
    before = await providers.find(tx, provider.name, lock=True)
    if before is None:
        await _require_room(tx)
    elif before.issuer != provider.issuer:
        raise IssuerFixed("issuer: cannot change; remove this provider and make another", field="issuer")
    made = await providers.put(tx, provider)
    detail = {
        "issuer": made.issuer,
        "client_id": made.client_id,
        "audiences": made.audiences,
        "groups_claim": made.groups_claim,
        "session_s": made.session_s,
        "enabled": made.enabled,
    }
    await audit.record(tx, caller.actor, "providers.put", made.name, detail=detail)
    tx.hint(subjects.REVOKED)
    return made


async def _require_room(tx: Tx) -> None:
    if len(await providers.list_all(tx, after="", limit=PROVIDERS_MAX)) == PROVIDERS_MAX:
        raise Conflict(f"there are {PROVIDERS_MAX} identity providers, the most that can be")


async def show(conn: Reader, caller: Caller, name: str) -> Provider:
    """One provider."""
    caller.require("providers.read")
    return _found(await providers.find(conn, name), name)


async def list_providers(conn: Reader, caller: Caller, *, after: str, limit: int) -> list[Provider]:
    """All."""
    caller.require("providers.read")
    return await providers.list_all(conn, after=after, limit=limit)


async def open_providers(conn: Reader) -> list[Provider]:
    """Those that people may log in with. Everyone may ask."""
    return await providers.list_enabled(conn, PROVIDERS_MAX)


async def remove(tx: Tx, caller: Caller, name: str) -> None:
    """Its tokens, sessions and mappings end with it; people stay known."""
    caller.require("providers.write")
    removed = _found(await providers.delete(tx, name), name)
    await audit.record(tx, caller.actor, "providers.remove", name, detail={"issuer": removed.issuer})
    tx.hint(subjects.REVOKED)


async def map_group(tx: Tx, caller: Caller, provider: str, new: NewMapping) -> GroupMapping:
    """Let a group of the provider do something."""
    caller.require("providers.write")
    _found(await providers.find(tx, provider, lock=True), provider)
    await _check_scope(tx, new)
    made = await providers.insert_mapping(
        tx,
        mapping_id=new_id("map"),
        provider=provider,
        group=new.group,
        role=new.role,
        project_id=new.project_id,
        organisation_id=new.organisation_id,
        operator=new.operator,
    )
    await _record(tx, caller, "providers.map", made)
    return made


async def _check_scope(tx: Tx, new: NewMapping) -> None:
    if sum((new.project_id is not None, new.organisation_id is not None, new.operator)) != 1:
        raise Invalid("give exactly one of project_id, organisation_id and operator", field="project_id")
    if new.operator != (new.role is None):
        raise Invalid("role: needed with a project or an organisation, and never with operator", field="role")
    if new.project_id is not None:
        check_id("prj", new.project_id, field="project_id")
        if await store.find_project(tx, new.project_id) is None:
            raise missing("project", new.project_id, field="project_id")
    if new.organisation_id is not None:
        check_id("org", new.organisation_id, field="organisation_id")
        if not await store.organisation_exists(tx, new.organisation_id):
            raise missing("organisation", new.organisation_id, field="organisation_id")


async def list_mappings(conn: Reader, caller: Caller, provider: str, *, after: str, limit: int) -> list[GroupMapping]:
    """What the provider's groups may do."""
    caller.require("providers.read")
    _found(await providers.find(conn, provider), provider)
    return await providers.list_mappings(conn, provider, after=after, limit=limit)


async def unmap_group(tx: Tx, caller: Caller, provider: str, mapping_id: str) -> None:
    """The group may no longer do this; whoever had it by this mapping is out within seconds."""
    caller.require("providers.write")
    removed = await providers.delete_mapping(tx, provider, mapping_id)
    if removed is None:
        raise missing("mapping", mapping_id)
    await _record(tx, caller, "providers.unmap", removed)


async def _record(tx: Tx, caller: Caller, action: str, mapping: GroupMapping) -> None:
    detail = {
        "provider": mapping.provider,
        "group": mapping.group,
        "role": mapping.role,
        "operator": mapping.operator,
        "project_id": mapping.project_id,
        "organisation_id": mapping.organisation_id,
    }
    await audit.record(tx, caller.actor, action, mapping.id, detail=detail)
    tx.hint(subjects.REVOKED)


def _found(provider: Provider | None, name: str) -> Provider:
    if provider is None:
        raise missing("identity provider", name)
    return provider

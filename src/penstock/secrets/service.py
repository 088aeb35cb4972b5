"""Set, list and delete secrets; refer to them from a unit; open them for the node that starts it.

A value goes in through `put` and comes out through `reveal` only, which no route of the API reaches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.kit import audit
from penstock.kit.audit import Actor
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import Invalid, missing
from penstock.secrets import model, store
from penstock.secrets.errors import (
    NotForEnv,
    SecretsTooBig,
    TooManySecrets,
    TooManyVersions,
    UnknownSecret,
    VersionGone,
)
from penstock.secrets.keyring import Keyring
from penstock.secrets.model import SECRETS_MAX, UNIT_BYTES_MAX, VALUE_BYTES_MAX, VERSIONS_MAX, Place, Secret, Version
from penstock.wire.rest import SecretUse
from penstock.wire.tasks import SecretRef


async def show(conn: Reader, caller: Caller, name: str) -> tuple[Secret, list[Version]]:
    """One secret and the versions of it that are kept."""
    caller.require("secrets.read")
    found = await store.find(conn, caller.project_id, name)
    if found is None:
        raise missing("secret", name)
    return found, await store.versions(conn, caller.project_id, name)


async def page(conn: Reader, caller: Caller, *, after: str, limit: int) -> list[Secret]:
    """The project's secrets, by name."""
    caller.require("secrets.read")
    return await store.page(conn, caller.project_id, after=after, limit=limit)


async def delete(tx: Tx, caller: Caller, name: str) -> None:
    """Nothing new can refer to it; what already does may still start."""
    caller.require("secrets.write")
    if not await store.delete(tx, caller.project_id, name):
        raise missing("secret", name)
    await audit.record(tx, caller.actor, "secrets.delete", name)


@dataclass(frozen=True, slots=True)
class Secrets:
    """The use cases that need keys, or are asked by other domains."""

    keyring: Keyring

    async def put(self, tx: Tx, caller: Caller, name: str, value: bytes) -> Secret:
        """The secret with this value as its newest version."""
        caller.require("secrets.write")
        if not 1 <= len(value) <= VALUE_BYTES_MAX:
            raise Invalid(f"value must have 1 to {VALUE_BYTES_MAX} bytes", field="value")
        project_id = caller.project_id
        await store.lock_project(tx, project_id)
        await _make_room(tx, project_id, name)
        changed = await store.advance(tx, project_id, name, by=caller.principal_id)
        place = Place(project_id=project_id, name=name, version=changed.version)
        await store.insert_version(
            tx,
            place,
            model.seal(place, value, self.keyring.current()),
            size=len(value),
            fits_env=b"\0" not in value,
            created_by=caller.principal_id,
        )
        await audit.record(tx, caller.actor, "secrets.write", name, detail={"version": changed.version})
        return changed

    async def refer(self, tx: Tx, *, project_id: str, uses: Sequence[SecretUse]) -> Sequence[SecretRef]:
        """The current version of each, for compute (its Protocol `Secrets`)."""
        found = await store.measures(tx, project_id, [use.name for use in uses])
        for use in uses:
            if use.name not in found:
                raise UnknownSecret(f"there is no secret {use.name}", field="secrets")
            if use.env and not found[use.name].fits_env:
                raise NotForEnv(f"secret {use.name} holds a NUL byte: it can be a file only", field="secrets")
        if sum(measure.bytes for measure in found.values()) > UNIT_BYTES_MAX:
            raise SecretsTooBig(f"secrets must have at most {UNIT_BYTES_MAX} bytes together", field="secrets")
        return [SecretRef(name=use.name, version=found[use.name].version, env=use.env) for use in uses]

    async def reveal(self, tx: Tx, actor: Actor, *, project_id: str, refs: Sequence[SecretRef]) -> dict[str, bytes]:
        """The values by name, for the node that `actor` is. Whoever calls has checked that it may have them."""
        places = [Place(project_id=project_id, name=ref.name, version=ref.version) for ref in refs]
        found = await store.envelopes(tx, places)
        if gone := [place.name for place in places if place not in found]:
            raise VersionGone(f"secret {gone[0]} is no longer kept in the version that the unit refers to")
        opened = {
            place.name: model.unseal(place, found[place], self.keyring.key(found[place].key_id)) for place in places
        }
        versions = {place.name: place.version for place in places}
        await audit.record(tx, actor, "secrets.reveal", actor.id, project_id=project_id, detail={"versions": versions})
        return opened


async def _make_room(tx: Tx, project_id: str, name: str) -> None:
    if await store.find(tx, project_id, name) is None and await store.count(tx, project_id) >= SECRETS_MAX:
        raise TooManySecrets(f"a project has at most {SECRETS_MAX} secrets")
    if await store.count_versions(tx, project_id, name) >= VERSIONS_MAX:
        raise TooManyVersions(
            f"at most {VERSIONS_MAX} versions of a secret are kept, and old ones for an hour: try again later"
        )

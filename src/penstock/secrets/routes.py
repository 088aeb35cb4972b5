"""Secrets over REST: they are written and deleted, and shown without their values."""

import base64
import binascii
import re
from typing import Any, Final

import msgspec
from litestar import MediaType, Response, Router, delete, get, put

from penstock.kit import idempotency, paging
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Tx
from penstock.kit.errors import Invalid, missing
from penstock.kit.idempotency import Once
from penstock.kit.paging import PageQuery
from penstock.secrets import service
from penstock.secrets.model import Secret, Version
from penstock.secrets.service import Secrets
from penstock.wire import rest

_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")


def router(secrets: Secrets, db: Database) -> Router:
    """All routes of secrets, below /api/v1."""

    @put("/secrets/{name:str}", operation_id="putSecret", opt={"action": "secrets.write"})
    async def put_secret(
        caller: Caller, once: Once | None, credential: str, name: str, data: rest.SecretPut
    ) -> Response[rest.Secret]:
        """Set a secret: its value becomes the next version. It cannot be read again."""
        if not _NAME.fullmatch(name):
            raise Invalid("name must be a slug of max 63 characters", field="name")
        value = _value(data)

        async def effect(tx: Tx) -> bytes:
            return msgspec.json.encode(_shown(await secrets.put(tx, caller, name, value)))

        # The digest that is kept with an Idempotency-Key must not help anybody to guess the value.
        sealed = once.sealed(credential) if once else None
        body: Any = await idempotency.run(db, sealed, effect)
        return Response(content=body, status_code=200, media_type=MediaType.JSON)

    @get("/secrets", operation_id="listSecrets")
    async def list_secrets(caller: Caller, page: PageQuery) -> rest.Page[rest.Secret]:
        """The project's secrets by name, without their values."""
        async with db.read() as conn:
            found = await service.page(conn, caller, after=_after(page), limit=page.limit + 1)
        items = [_shown(secret) for secret in found[: page.limit]]
        more = len(found) > page.limit
        return rest.Page(items=items, next_cursor=paging.encode_cursor("secret", items[-1].name) if more else None)

    @get("/secrets/{name:str}", operation_id="getSecret")
    async def get_secret(caller: Caller, name: str) -> rest.Secret:
        """One secret with the versions of it that are kept, without their values."""
        async with db.read() as conn:
            found, versions = await service.show(conn, caller, _path_name(name))
        return _shown(found, versions)

    @delete("/secrets/{name:str}", operation_id="deleteSecret")
    async def delete_secret(caller: Caller, name: str) -> None:
        """Delete a secret. What refers to it already may still start; after that, all its versions go."""
        async with db.transaction() as tx:
            await service.delete(tx, caller, _path_name(name))

    return Router(path="/", route_handlers=[put_secret, list_secrets, get_secret, delete_secret], tags=["secrets"])


def _value(data: rest.SecretPut) -> bytes:
    """The value itself. No message here may quote any of it."""
    if (data.value is None) == (data.value_base64 is None):
        raise Invalid("give either value or value_base64", field="value")
    if data.value is not None:
        return data.value.encode()
    assert data.value_base64 is not None
    try:
        return base64.b64decode(data.value_base64, validate=True)
    except (binascii.Error, ValueError):
        raise Invalid("value_base64 is not base64", field="value_base64") from None


def _path_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise missing("secret", name)
    return name


def _after(page: PageQuery) -> str:
    if page.cursor is None:
        return ""
    match paging.decode_cursor(page.cursor):
        case ["secret", str(last)]:
            return last
        case _:
            raise Invalid("invalid cursor", field="cursor")


def _shown(secret: Secret, versions: list[Version] | None = None) -> rest.Secret:
    return rest.Secret(
        name=secret.name,
        version=secret.version,
        created_at=secret.created_at,
        created_by=secret.created_by,
        updated_at=secret.updated_at,
        updated_by=secret.updated_by,
        versions=[
            rest.SecretVersion(version=each.version, created_at=each.created_at, created_by=each.created_by)
            for each in versions or []
        ],
    )

"""Object storage for functions (serverless's Protocols `Bytes` and `ProjectObjects`), and where processes find it."""

from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from penstock.kit import audit
from penstock.kit.db import Database
from penstock.kit.errors import Denied, Invalid
from penstock.storage import blobs
from penstock.storage.errors import NoObject, ObjectChanged, TooLarge
from penstock.storage.model import Limits, Object, check_prefix
from penstock.storage.model import content_type as checked_type
from penstock.storage.service import Objects, Wanted
from penstock.wire.serverless import Reference
from penstock.wire.unitobjects import ObjectEntry, ObjectPage

_ACTOR: Final = audit.system("functions")


class ObjectSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where objects are kept, and how much of them there may be."""

    objects_url: str
    objects_endpoint: str = ""
    objects_region: str = ""
    objects_access_key_id: str = ""
    objects_secret_access_key: str = ""
    object_bytes_max: Annotated[int, Meta(ge=1, le=5 << 40)] = 5 << 30
    project_object_bytes_max: Annotated[int, Meta(ge=0, le=1 << 60)] = 100 << 30

    @property
    def objects(self) -> blobs.Access:
        """How to reach them."""
        return blobs.Access(
            url=self.objects_url,
            endpoint=self.objects_endpoint,
            region=self.objects_region,
            access_key_id=self.objects_access_key_id,
            secret_access_key=self.objects_secret_access_key,
        )


def open_objects(database: Database, settings: ObjectSettings) -> Objects:
    """The objects of all projects."""
    limits = Limits(object_bytes_max=settings.object_bytes_max, project_bytes_max=settings.project_object_bytes_max)
    return Objects(database, blobs.connect(settings.objects), limits)


@dataclass(frozen=True, slots=True)
class ObjectBytes:
    """Payloads, results and code as objects of their project."""

    objects: Objects

    async def keep(self, project_id: str, key: str, chunks: AsyncIterator[bytes], *, bytes_max: int) -> Reference:
        """Store them; the same again changes nothing that matters."""
        wanted = Wanted(size=None)
        made = await self.objects.put(project_id, key, _bounded(chunks, bytes_max), actor=_ACTOR, wanted=wanted)
        return Reference(key=key, bytes=made.size, sha256=made.sha256.hex())

    async def open(self, project_id: str, key: str) -> tuple[int, AsyncIterator[bytes]]:
        """Their number, and they themselves."""
        found = await self.objects.get(project_id, key)
        return found.object.size, found.chunks

    async def drop(self, project_id: str, key: str) -> None:
        """They are of no use any more."""
        with suppress(NoObject):
            await self.objects.delete(project_id, key, actor=_ACTOR)


async def _bounded(chunks: AsyncIterator[bytes], bytes_max: int) -> AsyncIterator[bytes]:
    seen = 0
    async for chunk in chunks:
        seen += len(chunk)
        if seen > bytes_max:
            raise TooLarge(f"body: max {bytes_max} bytes", field="body")
        yield chunk


#: Below these the platform keeps code, payloads and results: handlers read them, and change none.
_PLATFORMS: Final = ("functions/", "invocations/")


@dataclass(frozen=True, slots=True)
class HandlersObjects:
    """The project's objects for its handlers (serverless's Protocol `ProjectObjects`)."""

    objects: Objects

    async def read(
        self, project_id: str, key: str, *, offset: int, length: int, sha256: str
    ) -> tuple[ObjectEntry, int, AsyncIterator[bytes]]:
        """A part of one object."""
        found = await self.objects.find(project_id, key)
        if sha256 and found.sha256.hex() != sha256:
            raise ObjectChanged("the object was changed while it was read", field="key")
        first = min(offset, found.size)
        end = min(first + length, found.size)
        download = await self.objects.read(found, first, end)
        return _entry(found), end - first, download.chunks

    async def write(
        self,
        project_id: str,
        key: str,
        chunks: AsyncIterator[bytes],
        *,
        content_type: str,
        only_new: bool,
        by: str,
    ) -> ObjectEntry:
        """Put an object, by the project's quota."""
        _check_own(key)
        kind = checked_type(content_type)
        if kind is None:
            raise Invalid("content type must look like type/subtype", field="content_type")
        wanted = Wanted(content_type=kind, only_new=only_new)
        return _entry(await self.objects.put(project_id, key, chunks, actor=_actor(project_id, by), wanted=wanted))

    async def page(self, project_id: str, *, prefix: str, after: str, limit: int) -> ObjectPage:
        """Objects by key."""
        found = await self.objects.page(
            project_id, prefix=prefix, after=check_prefix(after), limit=limit, grouped=False
        )
        return ObjectPage(objects=[_entry(each) for each in found.objects], after=found.after)

    async def delete(self, project_id: str, key: str, *, by: str) -> None:
        """Delete an object."""
        _check_own(key)
        await self.objects.delete(project_id, key, actor=_actor(project_id, by))


def _check_own(key: str) -> None:
    if key.startswith(_PLATFORMS):
        raise Denied(f"keys below {' and '.join(_PLATFORMS)} are the platform's: handlers only read them")


def _actor(project_id: str, by: str) -> audit.Actor:
    return audit.Actor(id=by, kind="function", project_id=project_id)


def _entry(found: Object) -> ObjectEntry:
    return ObjectEntry(key=found.key, size=found.size, sha256=found.sha256.hex(), contentType=found.content_type)

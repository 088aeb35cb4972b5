"""Object storage for functions (serverless's Protocol `Bytes`), and how processes that need it are told where it is."""

from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from penstock.kit import audit
from penstock.kit.db import Database
from penstock.storage import blobs
from penstock.storage.errors import NoObject, TooLarge
from penstock.storage.model import Limits
from penstock.storage.service import Objects, Wanted
from penstock.wire.serverless import Reference

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

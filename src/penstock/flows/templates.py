"""What workers of functions are made from, for serverless (its Protocol `Templates`)."""

import asyncio
from dataclasses import dataclass, field
from typing import Final

from penstock.compute.service import check
from penstock.kit.caller import Caller
from penstock.kit.db import Tx
from penstock.kit.errors import Invalid, NotFound
from penstock.secrets.service import Secrets
from penstock.storage.model import Object
from penstock.storage.service import Objects
from penstock.wire.archives import BadArchive, Reader
from penstock.wire.rest import AllocationCreate, CodeUse, FunctionPut

#: Archives that are read at once, by a thread each.
_READ_MAX: Final = 2
#: Unpacked, so much of an archive is read here; the node that unpacks it reads on.
_LOOK_BYTES_MAX: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Templates:
    """Compute knows what units may be, storage has the code."""

    secrets: Secrets
    objects: Objects
    _reading: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_READ_MAX))

    async def check_code(self, project_id: str, code: CodeUse) -> None:
        """Pass if the object is there and holds what the deployer means."""
        try:
            found = await self.objects.find(project_id, code.object)
        except NotFound as error:
            raise Invalid(f"there is no object {code.object}", field="code.object") from error
        if found.sha256.hex() != code.sha256:
            raise Invalid(f"the SHA-256 of object {code.object} is {found.sha256.hex()}", field="code.sha256")
        if found.size != code.bytes:
            raise Invalid(f"object {code.object} has {found.size} bytes", field="code.bytes")
        try:
            async with self._reading:
                await self._read(found)
        except BadArchive as error:
            raise Invalid(f"object {code.object} is no archive of code: {error}", field="code.object") from error

    async def _read(self, found: Object) -> None:
        """Pass if a node can unpack it, as far as is known without unpacking all of it."""
        reader = Reader()
        download = await self.objects.read(found, 0, found.size)
        async for piece in download.chunks:
            await asyncio.to_thread(reader.feed, piece)
            if reader.unpacked_bytes > _LOOK_BYTES_MAX:
                return
        reader.end()

    async def check(self, tx: Tx, caller: Caller, definition: FunctionPut) -> None:
        """Pass, or Invalid naming the field."""
        await check.template(tx, caller, allocation(definition), self.secrets)


def allocation(definition: FunctionPut) -> AllocationCreate:
    """A worker's allocation, as anybody would ask for it."""
    return AllocationCreate(
        sku=definition.sku,
        gpus=definition.gpus,
        image=definition.image,
        runtime=definition.runtime,
        env=definition.env,
        command=definition.command,
        secrets=definition.secrets,
        labels=definition.labels,
    )

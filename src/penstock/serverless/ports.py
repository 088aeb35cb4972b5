"""What functions ask of others; filled in `processes/` and `flows/`."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.serverless.model import Order
from penstock.wire.rest import CodeUse, FunctionPut
from penstock.wire.serverless import Reference
from penstock.wire.unitobjects import ObjectEntry, ObjectPage


class Pool(Protocol):
    """Allocations for workers. It takes the caller's transaction and never commits."""

    async def create(self, tx: Tx, order: Order) -> str:
        """The id of a new allocation; a PenstockError says why there is none. Its kind is EXHAUSTED where there might
        be one if others made room."""
        ...

    async def release(self, tx: Tx, allocation_id: str, reason: str) -> None:
        """Give it back; asking again changes nothing."""
        ...

    async def over(self, conn: Reader, allocation_ids: Sequence[str]) -> dict[str, str]:
        """Those that neither run nor will run, with what their rows say about that."""
        ...


class Bytes(Protocol):
    """Bytes that are too large for a row, in the project's object storage."""

    async def keep(self, project_id: str, key: str, chunks: AsyncIterator[bytes], *, bytes_max: int) -> Reference:
        """Store them."""
        ...

    async def open(self, project_id: str, key: str) -> tuple[int, AsyncIterator[bytes]]:
        """Their number, and they themselves."""
        ...

    async def drop(self, project_id: str, key: str) -> None:
        """They are of no use any more; none there is fine."""
        ...


class ProjectObjects(Protocol):
    """The objects of a project, for its handlers. `by` is whoever made the invocation."""

    async def read(
        self, project_id: str, key: str, *, offset: int, length: int, sha256: str
    ) -> tuple[ObjectEntry, int, AsyncIterator[bytes]]:
        """The object, how many bytes of it follow, and they themselves; a conflict if it is not the one of `sha256`."""
        ...

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
        """Put an object, whole or not at all."""
        ...

    async def page(self, project_id: str, *, prefix: str, after: str, limit: int) -> ObjectPage:
        """Objects by key."""
        ...

    async def delete(self, project_id: str, key: str, *, by: str) -> None:
        """Delete an object."""
        ...


class Templates(Protocol):
    """Whether workers can be made from a definition, capacity and funds aside."""

    async def check_code(self, project_id: str, code: CodeUse) -> None:
        """Pass if there is such an archive. Asked outside of transactions."""
        ...

    async def check(self, tx: Tx, caller: Caller, definition: FunctionPut) -> None:
        """Pass, or Invalid naming the field."""
        ...


class Vault(Protocol):
    """Keeps what must not be readable in the database. `name` says what it is and is bound to it."""

    def current_key_id(self) -> str:
        """The master key that is used now."""
        ...

    def seal(self, *, project_id: str, name: str, value: bytes) -> tuple[str, bytes]:
        """The id of the master key, and the value that only it opens."""
        ...

    def unseal(self, *, project_id: str, name: str, key_id: str, sealed: bytes) -> bytes:
        """The value."""
        ...

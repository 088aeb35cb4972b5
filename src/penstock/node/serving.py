"""Units that serve a function: their code, their keys, and what the sidecar is told of them.

The sidecar learns of a unit before its command is started, and of its end whichever way that comes. Keys that come
again with a repeated task replace those before: the control plane knows only the newest.
"""

import asyncio
import errno
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

import msgspec

from penstock.node import archives, framework
from penstock.node.codes import Codes
from penstock.node.drivers import CODE, FRAMEWORK
from penstock.node.errors import CODE_NOT_UNPACKED, CODE_UNAVAILABLE, Failed
from penstock.node.journal import UnitRecord
from penstock.wire.archives import BYTES_MAX
from penstock.wire.link import UnitState
from penstock.wire.serverless import SOCKET_FOLDER
from penstock.wire.sidecar import ExitClass
from penstock.wire.tasks import BAD_CODE, WORKER_KEYS, Serving, UnitHandoff, UnitStart, WorkerKeys

_THERE: Final = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR})
_FOLDER: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Sidecar(Protocol):
    """Whoever calls the frameworks on this node (`node.sidecarlink`)."""

    def serve(
        self, unit_id: str, *, uid: int, serving: Serving, keys: WorkerKeys, memory_bytes: int, folder: int
    ) -> None:
        """A unit that serves; the descriptor is the sidecar's from now on."""
        ...

    def ended(self, unit_id: str, *, exit_class: ExitClass, exit_code: int = 0, detail: str = "") -> None:
        """The unit is no more; one that does not serve is no news."""
        ...


class Workers:
    """The units of this node that serve. Without a sidecar there can be none."""

    def __init__(self, units: Path, *, sidecar: Sidecar | None = None, codes: Codes | None = None) -> None:
        self._units = units
        self._sidecar = sidecar
        self._codes = codes
        self._known: dict[str, WorkerKeys] = {}

    def keys(self, request: UnitStart | UnitHandoff, values: Mapping[str, bytes]) -> WorkerKeys | None:
        """The keys among the values of secrets; None for a unit that serves nothing. Failed when it could not serve."""
        if request.serving is None:
            return None
        if self._sidecar is None:
            raise Failed("no_sidecar", "no sidecar runs on this node, so it cannot serve functions")
        if WORKER_KEYS not in values:
            raise Failed("secrets_unavailable", "the worker's keys have not come")
        return msgspec.msgpack.decode(values[WORKER_KEYS], type=WorkerKeys)

    def expect(self, request: UnitStart | UnitHandoff) -> None:
        """A unit is about to need its code: fetch it while other things are done."""
        if request.serving is not None and request.serving.code is not None and self._codes is not None:
            self._codes.expect(request.serving.code, request.allocation_id)

    async def code(self, request: UnitStart | UnitHandoff) -> Path | None:
        """The archive with the function's code; None when it has none."""
        code = request.serving.code if request.serving else None
        if code is None:
            return None
        if self._codes is None:
            raise Failed(CODE_UNAVAILABLE, "this node cannot fetch code")
        if code.bytes > BYTES_MAX:
            raise archives.bad(f"it has {code.bytes} bytes, the most is {BYTES_MAX}")
        return await self._codes.get(code, request.allocation_id)

    async def unpack(self, archive: Path | None, unit_id: str, uid: int | None) -> None:
        """Bring the code into the unit's home. It is unpacked beside it, where no tenant can reach, and then renamed:
        nothing is ever written through a folder that a tenant's code may have changed."""
        if archive is None:
            return
        folder = self._units / unit_id
        fresh = folder / f"code-{secrets.token_hex(4)}"
        try:
            await self._unpack(archive, fresh, uid)
            fresh.rename(folder / "home" / CODE)
        except OSError as error:
            # It is there already when this handoff was done before: the unit then has its tenant, and goes on.
            if error.errno not in _THERE:
                raise Failed(CODE_NOT_UNPACKED, f"the code cannot be unpacked: {error.strerror}") from error
        finally:
            await asyncio.to_thread(shutil.rmtree, fresh, ignore_errors=True)

    async def _unpack(self, archive: Path, target: Path, uid: int | None) -> None:
        """An archive that this node's disk changed is no bad one: it is fetched anew when it is wanted again."""
        try:
            await archives.unpack(archive, target, uid=uid)
        except Failed as error:
            if error.code != BAD_CODE or self._codes is None or not await self._codes.drop_damaged(archive):
                raise
            raise Failed(CODE_NOT_UNPACKED, "the code was damaged on this node's disk") from error

    def register(self, record: UnitRecord) -> None:
        """Tell the sidecar of a unit that lives, unless it knows."""
        living = record.state in (UnitState.STARTING, UnitState.RUNNING)
        if self._sidecar is None or record.serving is None or record.keys is None or not living:
            return
        before = self._known.get(record.unit_id)
        if before == record.keys:
            return
        if before is not None:
            self._sidecar.ended(record.unit_id, exit_class=ExitClass.KILLED, detail="the worker has other keys now")
        folder = os.open(self._units / record.unit_id / FRAMEWORK, _FOLDER)
        self._known[record.unit_id] = record.keys
        self._sidecar.serve(
            record.unit_id,
            # Without a sandbox everything runs as the agent does.
            uid=record.uid if record.uid is not None and record.isolated else os.geteuid(),
            serving=_seen_inside(record.serving),
            keys=record.keys,
            memory_bytes=record.memory_bytes,
            folder=folder,
        )

    def ended(self, record: UnitRecord, detail: str = "") -> None:
        """Tell the sidecar, as the record has it; a unit that was ended before it could tell was killed."""
        if self._sidecar is None or self._known.pop(record.unit_id, None) is None:
            return
        kind = ExitClass(record.exit_class) if record.exit_class else ExitClass.KILLED
        self._sidecar.ended(record.unit_id, exit_class=kind, exit_code=record.exit_code or 0, detail=detail)


def _seen_inside(serving: Serving) -> Serving:
    """The socket by its whole path, as in the sandbox; the sidecar itself goes by the folder's descriptor."""
    return msgspec.structs.replace(serving, socket=f"{SOCKET_FOLDER}/{framework.socket_name(serving)}")

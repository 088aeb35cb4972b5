"""Functions' code on this node: archives by their SHA-256, fetched from a gateway once, kept up to a number of bytes.

A file below the folder is whole or not there. Those that have not been used for the longest time go first. No failure
here is the archive's fault: another node, or another attempt, may have it.
"""

import asyncio
import hashlib
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import aiohttp

from penstock.kit import dialling
from penstock.kit.clock import backoff_s
from penstock.kit.full import is_full
from penstock.kit.telemetry import logger
from penstock.node.errors import CODE_UNAVAILABLE, DISK_FULL, Failed
from penstock.node.identity import Identity
from penstock.wire.tasks import Code

_log = logger(__name__)
_TRIES: Final = 5
_TIMEOUT_S: Final = 120.0
_SILENT_S: Final = 20.0
_PIECE_BYTES: Final = 256 << 10
#: Another attempt may find another gateway, or the same one with its database.
_PASSING: Final = 500

#: The bytes of the code of an allocation's function; Failed when there are none for this node.
Fetch = Callable[[str], AsyncIterator[bytes]]


class Away(Exception):
    """No gateway gave the code; another attempt may do better."""


class Codes:
    """The archives of this node."""

    def __init__(self, folder: Path, fetch: Fetch, *, bytes_max: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for unfinished in folder.glob(".*"):
            unfinished.unlink()
        self._folder = folder
        self._fetch = fetch
        self._bytes_max = bytes_max
        self._fetching: dict[str, asyncio.Task[Path]] = {}

    def expect(self, code: Code, allocation_id: str) -> None:
        """It is wanted in a moment: begin to fetch it, if it is not here."""
        if self._find(code) is None:
            self._begin(code, allocation_id)

    async def get(self, code: Code, allocation_id: str) -> Path:
        """The archive, whole and of that digest; Failed when it cannot be had."""
        found = self._find(code)
        return found if found is not None else await asyncio.shield(self._begin(code, allocation_id))

    def _find(self, code: Code) -> Path | None:
        path = self._folder / code.sha256
        try:
            if path.stat().st_size != code.bytes:
                return None
            os.utime(path)
        except FileNotFoundError:
            return None
        return path

    def _begin(self, code: Code, allocation_id: str) -> asyncio.Task[Path]:
        """One fetch of a digest at a time, whoever wants it."""
        under_way = self._fetching.get(code.sha256)
        if under_way is None:
            under_way = asyncio.create_task(self._bring(code, allocation_id), name=f"code-{code.sha256[:12]}")
            self._fetching[code.sha256] = under_way
            under_way.add_done_callback(lambda task: self._end(code, task))
        return under_way

    def _end(self, code: Code, task: asyncio.Task[Path]) -> None:
        self._fetching.pop(code.sha256, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("code_not_fetched", sha256=code.sha256, error=str(error))

    async def _bring(self, code: Code, allocation_id: str) -> Path:
        if code.bytes > self._bytes_max:
            raise Failed(
                CODE_UNAVAILABLE, f"the code has {code.bytes} bytes, this node keeps at most {self._bytes_max}"
            )
        last = ""
        with suppress(TimeoutError):
            async with asyncio.timeout(_TIMEOUT_S):
                for attempt in range(_TRIES):
                    try:
                        return await self._fetch_once(code, allocation_id)
                    except (Away, aiohttp.ClientError, OSError) as error:
                        last = str(error) or repr(error)
                        if is_full(error) and not self._drop_oldest():
                            raise Failed(DISK_FULL, f"no space for the function's code: {last}") from error
                    await asyncio.sleep(backoff_s(attempt + 1, base_s=0.1, cap_s=2.0))
        raise Failed(CODE_UNAVAILABLE, f"the function's code could not be fetched: {last or 'it took too long'}")

    async def _fetch_once(self, code: Code, allocation_id: str) -> Path:
        unfinished = self._folder / f".{secrets.token_hex(8)}"
        digest, size = hashlib.sha256(), 0
        try:
            with unfinished.open("wb") as file:
                async for piece in self._fetch(allocation_id):
                    size += len(piece)
                    if size > code.bytes:
                        break
                    digest.update(piece)
                    file.write(piece)
            if size != code.bytes or digest.hexdigest() != code.sha256:
                raise Away("other bytes came than the function's version names")
            self._make_room(code)
            return unfinished.rename(self._folder / code.sha256)
        finally:
            unfinished.unlink(missing_ok=True)

    async def drop_damaged(self, archive: Path) -> bool:
        """Delete an archive whose bytes changed on this node's disk; whether they had."""
        if await asyncio.to_thread(_digest, archive) == archive.name:
            return False
        archive.unlink(missing_ok=True)
        return True

    def _drop_oldest(self) -> bool:
        """Give up the archive that was not used for the longest time; whether there was one."""
        kept = [entry for entry in self._folder.iterdir() if not entry.name.startswith(".")]
        if not kept:
            return False
        min(kept, key=lambda entry: entry.stat().st_mtime_ns).unlink()
        return True

    def _make_room(self, code: Code) -> None:
        kept = [(entry, entry.stat()) for entry in self._folder.iterdir() if not entry.name.startswith(".")]
        total = code.bytes + sum(found.st_size for _, found in kept)
        for entry, found in sorted(kept, key=lambda each: each[1].st_mtime_ns):
            if total <= self._bytes_max:
                return
            entry.unlink()
            total -= found.st_size

    async def close(self) -> None:
        """Give up what is under way."""
        tasks = list(self._fetching.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _digest(archive: Path) -> str:
    try:
        with archive.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError:
        return ""


class FromGateway:
    """Asks the gateways' mTLS listener, as this node."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    async def fetch(self, allocation_id: str) -> AsyncIterator[bytes]:
        """The bytes as they come."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENT_S, sock_read=_SILENT_S)
        async with (
            aiohttp.ClientSession(connector=dialling.connector(force_close=True), timeout=timeout) as session,
            session.get(
                self._identity.url(f"code/{allocation_id}"), ssl=self._identity.tls(), allow_redirects=False
            ) as response,
        ):
            if response.status >= _PASSING:
                raise Away(f"the gateway answered {response.status}")
            if response.status != 200:
                raise Failed("code_refused", f"the gateway gave no code: it answered {response.status}")
            async for piece in response.content.iter_chunked(_PIECE_BYTES):
                yield piece

"""Objects of the project inside a unit: each question is a frame of the invocation's answer, each answer a request."""

import base64
import concurrent.futures
import io
import json
import os
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from penstock.sdk.framework.exchange import Exchange
from penstock.sdk.functions import invocation
from penstock.sdk.functions.errors import FunctionCancelled, FunctionError, ObjectError, ObjectNotFound
from penstock.sdk.functions.objects import ObjectInfo

_READ_BYTES = 4 << 20
_WRITE_BYTES = 768 << 10
#: The sidecar itself gives up earlier.
_WAIT_S = 120.0

Future = concurrent.futures.Future


class InsideObjects:
    """The way to objects in a unit."""

    def __init__(self) -> None:
        self._loop_thread = threading.get_ident()
        self._waiting: dict[str, tuple[Exchange, Future[dict[str, Any]]]] = {}

    def open(self, key: str) -> tuple[ObjectInfo, BinaryIO]:
        """The object, and a file that reads it part by part."""
        info = _info(self.ask(op="read", key=key)["entry"])
        return info, cast("BinaryIO", io.BufferedReader(_Reader(self, info), _READ_BYTES))

    def put(self, key: str, content: BinaryIO, *, content_type: str, only_new: bool) -> ObjectInfo:
        """Send the file part by part; what fails on the way is not stored."""
        upload = os.urandom(8).hex()
        about = {"upload": upload, "key": key, "contentType": content_type, "onlyNew": only_new}
        part = content.read(_WRITE_BYTES)
        try:
            while True:
                following = content.read(_WRITE_BYTES) if part else b""
                data = base64.b64encode(part).decode()
                answer = self.ask(op="write", data=data, last=not following, **about)
                if not following:
                    return _info(answer["entry"])
                part = following
        except ObjectError:
            raise
        except BaseException:
            self._abandon(upload)
            raise

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Page by page."""
        after = ""
        while True:
            page = self.ask(op="list", prefix=prefix, after=after)["page"]
            yield from (_info(each) for each in page["objects"])
            after = page["after"]
            if not after:
                return

    def delete(self, key: str) -> None:
        """Delete an object."""
        self.ask(op="delete", key=key)

    def ask(self, **asked: Any) -> dict[str, Any]:
        """Block this thread until there is an answer; ObjectError when it is a refusal."""
        if threading.get_ident() == self._loop_thread:
            raise FunctionError("this would block the event loop: use `await penstock.objects.get.aio(…)` and the like")
        call, future = self._send(asked)
        try:
            answer = future.result(_WAIT_S)
        except concurrent.futures.TimeoutError:
            raise ObjectError(f"no answer came within {_WAIT_S:g} s") from None
        finally:
            self._waiting.pop(call, None)
        code, error = str(answer.get("code") or ""), str(answer.get("error") or "")
        if code:
            raise ObjectNotFound(error, code=code) if code == "not_found" else ObjectError(error, code=code)
        return answer

    def answered(self, message: dict[str, Any]) -> bool:
        """The sidecar brings an answer; whether anybody waits for it."""
        found = self._waiting.pop(str(message.get("call")), None)
        if found is None:
            return False
        if found[1].set_running_or_notify_cancel():
            found[1].set_result(message)
        return True

    def forget(self, exchange: Exchange) -> None:
        """The invocation is over or not wanted."""
        for call, (owner, future) in list(self._waiting.items()):
            if owner is exchange and self._waiting.pop(call, None) and future.set_running_or_notify_cancel():
                future.set_exception(FunctionCancelled("the invocation was cancelled or has ended"))

    def _abandon(self, upload: str) -> None:
        exchange = invocation.running()
        if isinstance(exchange, Exchange) and not exchange.over:
            exchange.say(_frame({"call": os.urandom(8).hex(), "op": "abort", "upload": upload}))

    def _send(self, asked: dict[str, Any]) -> "tuple[str, Future[dict[str, Any]]]":
        exchange = invocation.running()
        if not isinstance(exchange, Exchange):
            raise FunctionError("only code that runs for an invocation can use objects here")
        if exchange.over or exchange.cancelled:
            raise FunctionCancelled("the invocation was cancelled or has ended")
        call, future = os.urandom(8).hex(), Future[dict[str, Any]]()
        self._waiting[call] = (exchange, future)
        exchange.say(_frame({"call": call, **asked}))
        return call, future


class _Reader(io.RawIOBase):
    """Reads one object, as it was when it was opened."""

    def __init__(self, way: InsideObjects, info: ObjectInfo) -> None:
        super().__init__()
        self._way = way
        self._info = info
        self._position = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next byte comes from."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go elsewhere."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._info.size}[whence]
        if start + offset < 0:
            raise ValueError(f"negative position {start + offset}")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """The next part."""
        length = min(len(buffer), _READ_BYTES, max(0, self._info.size - self._position))
        if not length:
            return 0
        asked = {"key": self._info.key, "offset": self._position, "length": length, "sha256": self._info.sha256}
        data = base64.b64decode(self._way.ask(op="read", **asked).get("data") or "")
        if len(data) != length:
            raise ObjectError(f"{len(data)} bytes came instead of {length}")
        buffer[:length] = data
        self._position += length
        return length


def _frame(asked: "dict[str, Any]") -> bytes:
    return json.dumps({"object": asked}).encode()


def _info(entry: "dict[str, Any]") -> ObjectInfo:
    return ObjectInfo(entry["key"], int(entry["size"]), entry["sha256"], entry["contentType"])

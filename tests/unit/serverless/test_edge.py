"""Bodies of calls at the gateway."""

import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.kit.errors import Invalid
from penstock.kit.parsing import LOOP_BYTES_MAX
from penstock.serverless import edge


class Request:
    """A request whose body comes in two pieces."""

    content_length = None

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.content = self

    async def iter_any(self) -> AsyncIterator[bytes]:
        half = len(self.body) // 2
        yield self.body[:half]
        yield self.body[half:]


@pytest.mark.parametrize(("size", "leaves"), [(0, False), (LOOP_BYTES_MAX, False), (LOOP_BYTES_MAX + 1, True)])
async def test_a_large_body_is_checked_off_the_loop(size: int, leaves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    decode = edge.msgspec.json.decode

    def seen(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread())
        return decode(*args, **kwargs)

    monkeypatch.setattr(edge.msgspec.json, "decode", seen)
    body = b'"' + b"a" * (size - 2) + b'"' if size else b""
    assert await edge._payload(Request(body)) == (body or b"null")  # type: ignore[arg-type]
    assert [thread is not threading.main_thread() for thread in threads] == [leaves]


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000, b'"\xff"', b"[] []", b"\xff" * 100_000])
async def test_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(Invalid, match="body must be JSON"):
        await edge._payload(Request(body))  # type: ignore[arg-type]

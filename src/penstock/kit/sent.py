"""A response that has already been written."""

from typing import Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter


class Sent(web.StreamResponse):
    """Tells aiohttp that nothing is left to send, and whether the connection can have another request."""

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__()
        self._kept = keep_alive

    @property
    def keep_alive(self) -> bool | None:
        """Whether the connection lives on."""
        return self._kept

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:  # noqa: ARG002
        """Nothing to prepare."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing to send."""


#: It keeps nothing, so two of them serve all requests.
KEPT: Final = Sent(keep_alive=True)
CLOSED: Final = Sent(keep_alive=False)

"""Objects of a project: bytes under keys, streamed both ways."""

from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from penstock.sdk.errors import InvalidArgument
from penstock.sdk.protocol import PREFIX as API
from penstock.sdk.protocol import Listing, Request, Steps, attempts, call
from penstock.sdk.resources import Resource, X, download, listing, operation
from penstock.sdk.transfers import Download, Progress, Source, silent, upload_headers
from penstock.wire import rest
from penstock.wire.rest import Page

KEY_CHARS_MAX = 1024


class Objects(Resource[X]):
    """Bytes that outlive units."""

    @operation
    def put(
        self,
        key: str,
        content: bytes | Path | BinaryIO,
        *,
        content_type: str = "application/octet-stream",
        only_new: bool = False,
        on_progress: Progress = silent,
    ) -> Steps[rest.Object]:
        """Store these bytes, from memory or piece by piece from a file, in the place of what was there. `on_progress`
        is told how many have been sent."""
        source = Source(content, on_progress=on_progress)
        extra = {"Content-Type": content_type} | ({"If-None-Match": "*"} if only_new else {})
        request = Request(method="PUT", path=API + _path(key), headers=upload_headers(source, extra), body=source)
        return attempts(request, rest.Object, repeatable=source.repeatable and not only_new)

    @download
    def get(self, key: str, *, on_size: Progress = silent) -> Download:
        """The object's bytes, piece by piece; checked when the last one is there."""
        return Download(_path(key), on_size=on_size)

    @listing
    def list(self, *, prefix: str = "", limit: int | None = None) -> Listing[rest.Object]:
        """The objects of the current project by key."""
        return Listing(path="/objects", answer=Page[rest.Object], query={"prefix": prefix or None}, limit=limit)

    @operation
    def delete(self, key: str) -> Steps[None]:
        """Delete an object."""
        return call("DELETE", _path(key), type(None))


def _path(key: str) -> str:
    """The key as the rest of a path. What a client on the way would fold is refused here."""
    if not 1 <= len(key) <= KEY_CHARS_MAX or not {"", ".", ".."}.isdisjoint(key.split("/")):
        raise InvalidArgument(
            f"key must have 1 to {KEY_CHARS_MAX} characters and no empty, . or .. segments", field="key"
        )
    try:
        return f"/objects/{quote(key)}"
    except UnicodeEncodeError as error:
        raise InvalidArgument("key is not valid Unicode", field="key") from error

"""Objects of the project by the client, as `penstock.objects` wants them: from a program that runs in no unit."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final, cast

from penstock.sdk.client import Client
from penstock.sdk.errors import NotFound, SdkError
from penstock.sdk.functions.errors import ObjectError, ObjectNotFound
from penstock.sdk.functions.objects import ObjectInfo
from penstock.wire import rest

_SPOOLED_BYTES: Final = 8 << 20


class OutsideObjects:
    """The way to objects over HTTP."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def open(self, key: str) -> tuple[ObjectInfo, BinaryIO]:
        """The object, fetched whole into a file that is deleted when it is closed."""
        file = cast("BinaryIO", tempfile.SpooledTemporaryFile(_SPOOLED_BYTES))  # noqa: SIM115 - the caller closes it
        with _translated():
            found = next(iter(self._client.objects.list(prefix=key, limit=1)), None)
            for piece in self._client.objects.get(key):
                file.write(piece)
        file.seek(0)
        if found is None or found.key != key:
            raise ObjectNotFound("no object with this key", code="not_found")
        return _info(found), file

    def put(self, key: str, content: BinaryIO, *, content_type: str, only_new: bool) -> ObjectInfo:
        """Store what the file has."""
        with _translated():
            return _info(self._client.objects.put(key, content, content_type=content_type, only_new=only_new))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects by key."""
        with _translated():
            yield from (_info(each) for each in self._client.objects.list(prefix=prefix))

    def delete(self, key: str) -> None:
        """Delete an object."""
        with _translated():
            self._client.objects.delete(key)


def _info(found: rest.Object) -> ObjectInfo:
    return ObjectInfo(found.key, found.size, found.sha256, found.content_type)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except NotFound as error:
        raise ObjectNotFound(error.message, code=error.code) from error
    except SdkError as error:
        raise ObjectError(error.message, code=error.code) from error

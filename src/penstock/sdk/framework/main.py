"""The framework's process: it imports the handler, then listens.

The socket appears when everything is ready or known to be broken, complete and with mode 0660: it is bound under
another name and renamed. Nothing is served while the tenant's module loads, so that may take the main thread, as many
modules want.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat

from penstock.sdk.framework import capture, failures
from penstock.sdk.framework.connection import Connection
from penstock.sdk.framework.handler import Handler, put_first
from penstock.sdk.framework.server import Framework, end_process
from penstock.sdk.functions import imports, invocation, transport

_SOCKET = "/tmp/serverless-framework/framework.sock"  # noqa: S108 - the unit's own, by contract
_SOCKET_BYTES_MAX = 107
_SLOTS_MAX = 1000
_BACKLOG = 128
#: Of a traceback in the answer to a question about health, which the sidecar reads whole.
_EXPLANATION_CHARS_MAX = 8 << 10
#: What `exit` hooks may take; the unit is killed soon after.
_LEAVE_S = 4.0


def main() -> None:
    """Runs until the unit ends."""
    environ = os.environ
    capture.install()
    imports.inside()
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    handler = Handler()
    put_first(environ.get("PENSTOCK_CODE") or os.getcwd())  # noqa: PTH109
    framework = Framework(
        handler,
        broken=loop.run_until_complete(
            _load(handler, environ.get("PENSTOCK_HANDLER", ""), environ.get("SERVERLESS_REQUEST_ID", ""))
        ),
        slots=_slots(environ.get("PENSTOCK_CONCURRENCY", "")),
        invoke=environ.get("SERVERLESS_FRAMEWORK_INVOKE_PATH") or "/invoke",
        health=environ.get("SERVERLESS_FRAMEWORK_HEALTH_PATH") or "/healthz",
    )
    transport.use(lambda: framework.calls)
    invocation.know_sole(framework.sole)
    listener = listen(environ.get("SERVERLESS_FRAMEWORK_SOCKET_PATH") or _SOCKET)
    serving = loop.create_unix_server(lambda: Connection(framework.serve), sock=listener, backlog=_BACKLOG)
    loop.run_until_complete(serving)
    loop.add_signal_handler(signal.SIGTERM, lambda: loop.create_task(_leave(handler)))
    loop.run_forever()


async def _load(handler: Handler, name: str, deployed: str) -> bytes:
    """Nothing, or why it failed."""
    if not name:
        return b""
    try:
        await handler.load(name, deployed)
    except BaseException as error:  # noqa: BLE001 - whatever a tenant's module raises is told to its owner
        what = f"{type(error).__name__}: {failures.message(error)}"
        return json.dumps({"error": what, "traceback": failures.traceback(error)[-_EXPLANATION_CHARS_MAX:]}).encode()
    return b""


async def _leave(handler: Handler) -> None:
    with contextlib.suppress(Exception):
        await asyncio.wait_for(handler.leave(), _LEAVE_S)
    end_process(0)


def _slots(text: str) -> int:
    return min(_SLOTS_MAX, max(1, int(text))) if text.isascii() and text.isdecimal() else _SLOTS_MAX


def listen(path: str) -> socket.socket:
    """The listening socket, at its place."""
    if len(os.fsencode(path)) > _SOCKET_BYTES_MAX:
        raise SystemExit(f"the socket's path has more than {_SOCKET_BYTES_MAX} bytes: {path}")
    draft = f"{path[: _SOCKET_BYTES_MAX - 4]}.new" if len(path) > _SOCKET_BYTES_MAX - 4 else f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(draft)  # noqa: PTH108
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(draft)
    os.chmod(draft, stat.S_IRUSR | stat.S_IWUSR | stat.S_IRGRP | stat.S_IWGRP)  # noqa: PTH101
    listener.listen(_BACKLOG)
    os.rename(draft, path)  # noqa: PTH104
    return listener

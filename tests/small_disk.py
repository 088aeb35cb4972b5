"""A disk of a few MiB for one server, in a mount namespace of the server's own: no root is needed."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from penstock.embedded.child import Child
from penstock.embedded.server import Server

_SCRIPT = 'mount -t tmpfs -o size="$1" small "$2" && shift 2 && exec "$@"'
_FILL = "fill"


def on_small_disk(server: Server, store: Path, *, mib: int) -> Server:
    """The same server with a tmpfs of this size at `store`."""
    unshare = shutil.which("unshare")
    assert unshare is not None, "unshare (util-linux) is needed"
    store.mkdir(parents=True, exist_ok=True)
    namespace = (unshare, "--user", "--map-root-user", "--mount")
    argv = (*namespace, "sh", "-c", _SCRIPT, "sh", f"{mib}m", store, *server.argv)
    return replace(server, argv=argv, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **server.env})


@contextmanager
def full(child: Child, store: Path) -> Iterator[None]:
    """No byte is left on the server's disk while inside."""
    file = Path(f"/proc/{child.pid}/root{store}") / _FILL
    with file.open("wb", buffering=0) as output:
        try:
            while output.write(bytes(1 << 12)):
                pass
        except OSError:
            pass
    try:
        yield
    finally:
        file.unlink()

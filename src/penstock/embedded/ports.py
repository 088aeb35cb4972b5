"""Loopback ports: finding a free one, and saying clearly when one is taken."""

import socket
from pathlib import Path
from random import randint
from typing import Final

from penstock.kit.errors import Unavailable

#: Below the range from which the kernel takes ports of its own accord: a port that was free then stays free.
_FIRST: Final = 20_000
_LAST: Final = 32_000
_TRIES: Final = 200
#: Given to somebody in this process, who may not listen yet.
_given: Final[set[int]] = set()


def free_port() -> int:
    """A port that nothing listens on now, chosen at random, and never the same twice."""
    for _ in range(_TRIES):
        port = randint(_FIRST, _LAST)
        if port not in _given and is_free(port):
            _given.add(port)
            return port
    raise Unavailable(f"no free port found between {_FIRST} and {_LAST}")


def listening(port: int, host: str = "127.0.0.1") -> bool:
    """Whether something accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((host, port)) == 0


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def require_free(port: int, wanted_for: str, host: str = "127.0.0.1") -> None:
    """Unavailable, naming the port and who holds it, when the port is taken."""
    if is_free(port, host):
        return
    holder = _holder(port)
    raise Unavailable(f"port {port}, wanted for {wanted_for}, is in use{f' by {holder}' if holder else ''}")


def _holder(port: int) -> str:
    """The listening process's name and id, when this user may know it."""
    inode = _listening_inode(port)
    for link in Path("/proc").glob("[0-9]*/fd/*") if inode else ():
        try:
            if str(link.readlink()) == f"socket:[{inode}]":
                process = link.parent.parent
                return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
        except OSError:
            continue
    return ""


def _listening_inode(port: int) -> str:
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        try:
            rows = [line.split() for line in table.read_text().splitlines()[1:]]
        except OSError:
            continue
        for row in rows:
            if row[3] == "0A" and int(row[1].rsplit(":", 1)[1], 16) == port:
                return row[9]
    return ""

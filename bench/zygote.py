"""A bare zygote handoff: an interpreter in a bubblewrap sandbox forks on a descriptor and the fork writes a byte to it.

What any handoff costs at least, without a task, a journal, a tenant or an init; a reference for `bench handoff`.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.node.sandbox import find_binary

_ZYGOTE = """
import asyncio, http.client, json, logging, os, signal, socket, ssl, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
agent = socket.socket(fileno=int(sys.argv[1]))
agent.send(b"ready")
while True:
    asked, descriptors, _, _ = socket.recv_fds(agent, 16, 1)
    if not asked:
        break
    if os.fork() == 0:
        os.write(descriptors[0], b"x")
        os._exit(0)
    os.close(descriptors[0])
"""


@contextmanager
def _zygote() -> Iterator[socket.socket]:
    """A connection to one that is ready."""
    binary = find_binary()
    if binary is None:
        raise RuntimeError("bubblewrap is not installed")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sandbox = [
        str(binary),
        "--unshare-all",
        "--die-with-parent",
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
    ]
    with (
        theirs,
        ours,
        subprocess.Popen(
            [*sandbox, sys.executable, "-I", "-c", _ZYGOTE, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        ) as process,
    ):
        theirs.close()
        try:
            if ours.recv(16) != b"ready":
                raise RuntimeError("the zygote did not start")
            yield ours
        finally:
            process.kill()


def bare_handoff_s(n: int) -> list[float]:
    """From sending the descriptor to the first byte on it, `n` times."""
    with _zygote() as zygote:
        return [_hand_over(zygote) for _ in range(n)]


def _hand_over(zygote: socket.socket) -> float:
    read, write = os.pipe()
    began = time.perf_counter()
    socket.send_fds(zygote, [b"take"], [write])
    first = os.read(read, 1)
    taken = time.perf_counter() - began
    os.close(read)
    os.close(write)
    if first != b"x":
        raise RuntimeError("the zygote ended")
    return taken

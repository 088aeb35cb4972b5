"""Connections that aiohttp's client makes on uvloop, without its way of closing a stranger's file.

aiohttp connects a socket and hands it to uvloop. When the other side resets the connection at that moment, uvloop
closes the file before it has taken the socket object over; the object is left behind with a number that the kernel
gives to the next file, and would close that one when it is collected. Here nothing is closed by collection: whoever
fails to connect closes its socket explicitly, and connections that stand are closed by the loop.
"""

import socket
from typing import Any

import aiohttp


class LoopSocket(socket.socket):
    """A socket whose file is the loop's to close."""

    def __del__(self) -> None:
        """Leave the file alone."""


def connector(*, force_close: bool = False) -> aiohttp.TCPConnector:
    """For a session of a process that dials again and again; with `force_close`, for every request."""
    return aiohttp.TCPConnector(socket_factory=_socket, force_close=force_close)


def _socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol = address[:3]
    return LoopSocket(family, kind, protocol)

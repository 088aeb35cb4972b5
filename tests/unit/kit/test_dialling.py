"""Sockets that are the loop's to close."""

import os
import socket

from penstock.kit.dialling import LoopSocket


def test_collection_closes_no_file() -> None:
    left, other = socket.socketpair()
    made = LoopSocket(fileno=left.detach())
    number = made.fileno()
    del made
    os.fstat(number)
    os.close(number)
    other.close()


def test_an_explicit_close_does() -> None:
    made = LoopSocket()
    made.close()
    assert made.fileno() == -1

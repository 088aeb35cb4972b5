"""Handlers that do what no handler should."""

import os
import pathlib
import socket
import sys
import time

import penstock

app = penstock.App("hostile")
OPTIONS = {"sku": "tiny", "timeout_s": 20, "workers_max": 2, "idle_s": 1}


@app.function(**OPTIONS)
def misbehave(how: str) -> object:
    return globals()[f"do_{how}"]()


def do_nothing() -> str:
    return "fine"


def do_exit() -> None:
    sys.exit(3)


def do_die() -> None:
    os._exit(1)


def do_hang() -> None:
    time.sleep(3600)


def do_fork() -> str:
    for _ in range(20):
        if os.fork() == 0:
            time.sleep(3600)
    return "forked"


def do_memory() -> int:
    kept = []
    while True:
        kept.append(b"x" * (64 << 20))


def do_disk() -> int:
    written = 0
    with pathlib.Path("full").open("wb") as file:
        while True:
            written += file.write(b"x" * (8 << 20))


def do_close() -> str:
    for descriptor in range(3, 256):
        try:
            os.close(descriptor)
        except OSError:
            continue
    return "closed"


def do_shout() -> str:
    for _ in range(64):
        print("x" * (1 << 20))
    return "shouted"


def do_unserialisable() -> object:
    return socket


def do_nats() -> str:
    socket.create_connection(("127.0.0.1", 4222), timeout=2)
    return "connected"

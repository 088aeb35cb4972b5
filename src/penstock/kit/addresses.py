"""Where a name leads: every address that it has, and which of them strangers may make us connect to.

Whoever connects to what somebody else named looks the name up once, asks this of every address that came back, and
connects to that very address: a name that changes its mind between check and use gains nothing.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from penstock.wire import egress
from penstock.wire.egress import Address, address_of

Resolve = Callable[[str, int], Awaitable[Sequence[Address]]]


async def look_up(threads: ThreadPoolExecutor, host: str, port: int) -> Sequence[Address]:
    """Every address of a name."""
    ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(threads, ask)
    return [address for entry in found if (address := address_of(str(entry[4][0]))) is not None]


def is_elsewhere(address: Address) -> bool:
    """Whether this is a public address, and none of this host's own: only those can be bound to."""
    if not egress.is_public(address):
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as here:
            here.bind((str(address), 0))
    except OSError:
        return True
    return False

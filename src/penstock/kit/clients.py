"""Who connects, when proxies stand between."""

import ipaddress
from collections.abc import Sequence

Networks = Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]


def client_address(peer: str, forwarded_for: bytes | None, trusted: Networks) -> str:
    """Who connects: the peer, or, only behind trusted proxies, the nearest untrusted address they report."""
    if forwarded_for is None or not _within(peer, trusted):
        return peer
    nearest = peer
    for hop in reversed(forwarded_for.decode("latin-1").split(",")):
        nearest = hop.strip()
        if not _within(nearest, trusted):
            break
    return nearest[:64]


def _within(address: str, networks: Networks) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(parsed in network for network in networks)

"""Where a unit may connect to: rules such as `pypi.org`, `*.example.com:443`, `203.0.114.0/24:8000-8100`.

A rule is a host name, `*.` and a domain (its subdomains), an address, a network, or `*` for every public host; after a
colon the ports, 443 when there are none. Whatever the rules say, only public addresses are ever connected to: private,
loopback, link-local (the clouds' metadata) and other special ones are refused.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

RULES_MAX: Final = 100
RULE_CHARS_MAX: Final = 300
DEFAULT_PORT: Final = 443
_PORT_MAX: Final = 65535
_NAME: Final = re.compile(
    r"(?=.{1,253}$)([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
)
_PORTS: Final = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*|\*")
#: Addresses inside these carry an IPv4 address that a gateway on the way may unpack.
_WRAPPING: Final = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")))
#: Public by their number alone: site-local, documentation, and where a cloud (Azure) serves its own machines.
_SPECIAL: Final[tuple[Network, ...]] = tuple(map(ipaddress.ip_network, ("fec0::/10", "3fff::/20", "168.63.129.16/32")))


class BadRule(ValueError):
    """A rule that cannot be read; the text says why."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `name` is a host, a domain with its leading dot, or empty for every host; or there is a network."""

    name: str
    network: Network | None
    ports: tuple[tuple[int, int], ...]

    def allows(self, host: str, port: int) -> bool:
        """Whether a connection to this host, as the client names it, passes."""
        return any(first <= port <= last for first, last in self.ports) and self._covers(host)

    def _covers(self, host: str) -> bool:
        if self.network is not None:
            address = address_of(host)
            return address is not None and address.version == self.network.version and address in self.network
        if not self.name:
            return True
        return host.endswith(self.name) if self.name.startswith(".") else host == self.name


def parse(text: str) -> Rule:
    """The rule, or BadRule."""
    if len(text) > RULE_CHARS_MAX:
        raise BadRule(f"a rule has at most {RULE_CHARS_MAX} characters")
    if "://" in text:
        raise BadRule(f"{text!r}: a host name or a pattern is expected, not a URL; did you mean {_host_of(text)}?")
    host, ports = _split(text.strip().lower())
    if host == "*":
        return Rule("", None, ports)
    network = _network(host)
    if network is not None:
        if not is_public(network.network_address) or not is_public(network.broadcast_address):
            raise BadRule(f"{host} is not public: private and special addresses are never connected to")
        return Rule("", network, ports)
    domain = host.removeprefix("*.")
    if not _NAME.fullmatch(domain) or re.fullmatch(r"[\d.]+", domain):
        raise BadRule(f"{host!r} is no host name, *.domain, address or network")
    return Rule(f".{domain}" if domain != host else host, None, ports)


def _host_of(url: str) -> str:
    """The rule for the host and the port of a URL."""
    scheme, _, rest = url.strip().lower().partition("://")
    host = re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")[2]
    plain = scheme == "http" and host and ":" not in host
    return f"{host}:80" if plain else host or "a host"


def _split(text: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise BadRule("an IPv6 address with ports is written [address]:ports")
        return host, _ports(rest[1:])
    if text.count(":") > 1:
        return text, _ports("")
    host, _, ports = text.partition(":")
    return host, _ports(ports)


def _ports(text: str) -> tuple[tuple[int, int], ...]:
    if not text:
        return ((DEFAULT_PORT, DEFAULT_PORT),)
    if not _PORTS.fullmatch(text):
        raise BadRule(f"ports must look like 443, 80,443, 8000-8100 or *, not {text!r}")
    if text == "*":
        return ((1, _PORT_MAX),)
    spans = tuple(
        (int(first), int(last or first)) for first, _, last in (part.partition("-") for part in text.split(","))
    )
    if any(not 0 < first <= last <= _PORT_MAX for first, last in spans):
        raise BadRule(f"ports must be 1 to {_PORT_MAX}, not {text!r}")
    return spans


def _network(text: str) -> Network | None:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        if "/" in text:
            raise BadRule(f"{text!r} is no network: {error}") from error
        return None


def parse_all(texts: Iterable[str]) -> list[Rule]:
    """All of them, or BadRule for the first that cannot be read."""
    return [parse(text) for text in texts]


def address_of(host: str) -> Address | None:
    """The address that `host` spells, if it spells one; forms that only some programs read do not count."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_host(text: str) -> bool:
    """Whether this is a name or an address and nothing else. A resolver stops reading at a zero byte, and the zone of
    an address may end like a domain: what a rule is compared with must be what is connected to."""
    return _NAME.fullmatch(text) is not None or (address_of(text) is not None and "%" not in text)


def is_public(address: Address) -> bool:
    """Whether anybody on the Internet could be meant."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if any(address in network for network in _WRAPPING):
            return False
    special = address.is_multicast or address.is_reserved or any(address in network for network in _SPECIAL)
    return address.is_global and not special

"""Where people and nodes connect: on loopback or the address asked for, on the ports asked for or remembered."""

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from penstock.embedded.ports import free_port, is_free, require_free
from penstock.kit.errors import Invalid
from penstock.processes.up.folder import Ports

HOST: Final = "127.0.0.1"
USUAL: Final = Ports(api=8080, gateway=8081, link=8443, nats=8444)
_WORDS: Final = {"api": "the api", "gateway": "the gateway", "link": "the link", "nats": "NATS"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The address and the ports that the caller insists on."""

    host: str | None = None
    api: int | None = None
    gateway: int | None = None
    link: int | None = None
    nats: int | None = None


def choose(
    wanted: Wanted, remembered: Ports | None, *, available: Callable[[int, str], bool] = is_free
) -> tuple[Ports, list[str]]:
    """The ports, and what to tell about them. A port that was asked for and is taken is an error."""
    explicit = [port for port in (wanted.api, wanted.gateway, wanted.link, wanted.nats) if port is not None]
    if len(set(explicit)) != len(explicit):
        raise Invalid("--api-port, --gateway-port, --link-port and --nats-port must differ", field="port")
    host = wanted.host or (remembered.host if remembered else HOST)
    chosen: dict[str, int] = {}
    notes: list[str] = []
    if host != HOST:
        _check(host)
        notes.append(f"listening on {host}, without encryption for people: keep it in a network that you trust")
    elif wanted.nats is not None:
        raise Invalid("--nats-port is for nodes elsewhere: it needs --address", field="port")
    for name in _listeners(host):
        asked: int | None = getattr(wanted, name)
        if asked is not None:
            if not available(asked, host):
                require_free(asked, _WORDS[name], host)
            chosen[name] = asked
            continue
        usual: int = getattr(USUAL, name)
        last: int = getattr(remembered, name) if remembered else usual
        taken = {*chosen.values(), *explicit}
        port = next((port for port in (last, usual) if port not in taken and available(port, host)), None)
        if port is None:
            port = free_port()
            notes.append(f"port {last} is in use: {_WORDS[name]} listens on {port} instead")
        chosen[name] = port
    return Ports(**{"nats": remembered.nats if remembered else USUAL.nats, **chosen}, host=host), notes


def _listeners(host: str) -> list[str]:
    """On loopback NATS takes a port of its own choice, for this machine alone."""
    return [name for name in _WORDS if host != HOST or name != "nats"]


def _check(host: str) -> None:
    """An address of this machine that others can be told: not a name, not all of them at once."""
    try:
        address = ip_address(host)
    except ValueError as error:
        raise Invalid("--address must be an IPv4 address of this machine", field="address") from error
    if address.version != 4 or address.is_unspecified or not is_free(0, host):
        raise Invalid("--address must be an IPv4 address of this machine", field="address")

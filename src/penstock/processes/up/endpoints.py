"""Which ports people and nodes connect to: the ones asked for, else those of the last start, else the usual ones."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from penstock.embedded.ports import free_port, is_free, require_free
from penstock.kit.errors import Invalid
from penstock.processes.up.folder import Ports

HOST: Final = "127.0.0.1"
USUAL: Final = Ports(api=8080, gateway=8081, link=8443)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Ports that the caller insists on."""

    api: int | None = None
    gateway: int | None = None
    link: int | None = None


def choose(
    wanted: Wanted, remembered: Ports | None, *, available: Callable[[int], bool] = is_free
) -> tuple[Ports, list[str]]:
    """The ports, and what to tell about them. A port that was asked for and is taken is an error."""
    explicit = [port for port in (wanted.api, wanted.gateway, wanted.link) if port is not None]
    if len(set(explicit)) != len(explicit):
        raise Invalid("--api-port, --gateway-port and --link-port must differ", field="port")
    chosen: dict[str, int] = {}
    notes: list[str] = []
    for name in ("api", "gateway", "link"):
        asked: int | None = getattr(wanted, name)
        if asked is not None:
            if not available(asked):
                require_free(asked, f"the {name}")
            chosen[name] = asked
            continue
        usual: int = getattr(USUAL, name)
        last: int = getattr(remembered, name) if remembered else usual
        taken = {*chosen.values(), *explicit}
        port = next((port for port in (last, usual) if port not in taken and available(port)), None)
        if port is None:
            port = free_port()
            notes.append(f"port {last} is in use: the {name} listens on {port} instead")
        chosen[name] = port
    return Ports(**chosen), notes

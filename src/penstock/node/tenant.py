"""What a tenant brings to a unit, and how init is told: lengths first, so that a part is never taken for the whole.

Values of secrets are only ever in memory: here, in the pipe or memory file to init, and in the unit's own files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.node import framework
from penstock.node.drivers import Places
from penstock.node.errors import Failed, Refused
from penstock.wire.tasks import UnitHandoff, UnitStart

_SECRETS_BYTES_MAX: Final = 2 << 20
_FIELDS_BYTES_MAX: Final = 1 << 20
#: Most programs read these by themselves. Init listens there.
_PROXY: Final = "127.0.0.1:3128"
_WAY_OUT: Final = {
    "PENSTOCK_EGRESS": _PROXY,
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), f"http://{_PROXY}"),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1"),
}
_LIMITS: Final = ("processes", "files", "file_bytes", "address_space")


@dataclass(frozen=True)
class Tenant:
    """A command, variables, and the values of secrets by the name of their file."""

    command: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, bytes] = field(default_factory=dict, repr=False)


def tenant(
    request: UnitStart | UnitHandoff, values: Mapping[str, bytes], *, isolated: bool, places: Places | None = None
) -> Tenant:
    """The request's tenant with the values of its secrets, which must all be there, and where its way out is. `places`
    are those of a unit that serves a function."""
    secrets: dict[str, bytes] = {}
    env = (_WAY_OUT if request.egress and isolated else {}) | request.env
    for secret in request.secrets:
        if secret.name not in values:
            raise Failed("secrets_unavailable", f"the secret {secret.name} has no value")
        secrets[secret.name] = values[secret.name]
        if secret.env:
            env[secret.env] = values[secret.name].decode(errors="surrogateescape")
    if sum(map(len, secrets.values())) > _SECRETS_BYTES_MAX:
        raise Refused("too_large", f"the secrets of a unit exceed {_SECRETS_BYTES_MAX} bytes")
    if request.serving is None or places is None:
        return Tenant(request.command, env, secrets)
    command = framework.command(places) if request.serving.framework else request.command
    return Tenant(command, env | framework.variables(request.serving, places), secrets)


def content(who: Tenant, *, before: Sequence[str] = ()) -> bytes:
    """The message for init; `before` are fields that come first."""
    fields = [*before, str(len(who.command)), *who.command, str(len(who.secrets))]
    for name, value in who.secrets.items():
        fields += [name, str(len(value))]
    fields += [f"{name}={value}" for name, value in who.env.items()]
    text = "\0".join(fields).encode(errors="surrogateescape")
    if text.count(b"\0") != len(fields) - 1 or len(text) > _FIELDS_BYTES_MAX:
        raise Refused("malformed", f"command and env must fit {_FIELDS_BYTES_MAX} bytes, without zero bytes")
    blob = b"".join(who.secrets.values())
    return b"%08d%08d" % (len(text), len(blob)) + text + blob


def configure(
    who: Tenant, *, isolated: bool, secrets_folder: str, limits: Mapping[str, int], zygote: Sequence[str]
) -> bytes:
    """What init reads from its standard input."""
    numbers = (str(limits[name]) for name in _LIMITS)
    return content(who, before=["1" if isolated else "0", secrets_folder, *numbers, str(len(zygote)), *zygote])

"""Whether a request makes sense at all, before anything is locked or read."""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Final

from penstock.compute.errors import BadDigest, BadGpuCount, BadId, BadImage, ReservedEnv, UnknownSku
from penstock.compute.model import Sku
from penstock.kit.errors import Invalid
from penstock.kit.ids import is_id, made_s
from penstock.wire.rest import AllocationCreate, SecretUse
from penstock.wire.tasks import RESERVED_ENV_PREFIXES

SKUS_NAMED_MAX: Final = 12
_ID_CHARS: Final = 30
#: So far a client's clock may be off.
_CLOCK_S_MAX: Final = 24 * 3600
ENV_BYTES_MAX: Final = 32 << 10
COMMAND_BYTES_MAX: Final = 64 << 10

_IMAGE: Final = re.compile(
    r"[a-z0-9]+([._/-]+[a-z0-9]+)*(:[0-9]{1,5}(/[a-z0-9._-]+)+)?(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?"
)
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def request(body: AllocationCreate) -> None:
    """Pass, or an error that names the field."""
    if body.id is not None:
        chosen_id(body.id, now_s=time.time())
    image(body.image)
    environment(body.env)
    command(body.command)
    secrets(body.secrets, body.env)
    if len(set(body.ports)) != len(body.ports):
        raise Invalid("ports must not repeat", field="ports")


def chosen_id(text: str, *, now_s: float) -> None:
    """An id of now: lists are ordered by id, and the words for default objects are no allocation's."""
    if not is_id("alc", text) or len(text) != _ID_CHARS:
        raise BadId("id must look like alc_ followed by 26 letters and digits", field="id")
    if abs(made_s(text) - now_s) > _CLOCK_S_MAX:
        raise BadId("id must begin with the time of now: is the clock of this machine right?", field="id")


def image(name: str) -> None:
    """A name, maybe with a tag, maybe with a digest."""
    base, at, digest = name.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        raise BadDigest("image has a bad digest: it must be sha256: and 64 hexadecimal digits", field="image")
    if not _IMAGE.fullmatch(base):
        raise BadImage("image must look like name:tag or name@sha256:digest", field="image")


def environment(env: Mapping[str, str]) -> None:
    """Names that a shell would take, none of them reserved, and not too much of it."""
    for name, value in env.items():
        _variable(name, "env")
        _no_nul(value, "env")
    if sum(len(name) + len(value.encode()) for name, value in env.items()) > ENV_BYTES_MAX:
        raise Invalid(f"env must be at most {ENV_BYTES_MAX} bytes in all", field="env")


def _variable(name: str, field: str) -> None:
    if not _ENV_NAME.fullmatch(name):
        raise Invalid("env names must be letters, digits and underscores, at most 128, no digit first", field=field)
    if name.upper().startswith(RESERVED_ENV_PREFIXES):
        reserved = ", ".join(f"{prefix}*" for prefix in RESERVED_ENV_PREFIXES)
        raise ReservedEnv(f"env {name} is reserved (reserved_env): {reserved}", field=field)


def command(argv: Sequence[str]) -> None:
    """Arguments that a process can be started with."""
    for argument in argv:
        _no_nul(argument, "command")
    if sum(len(argument.encode()) for argument in argv) > COMMAND_BYTES_MAX:
        raise Invalid(f"command must be at most {COMMAND_BYTES_MAX} bytes in all", field="command")
    if argv and not argv[0]:
        raise Invalid("command must begin with a program", field="command")


def secrets(uses: Sequence[SecretUse], env: Mapping[str, str]) -> None:
    """Each secret once, in variables that a tenant may set and that nothing else sets."""
    if len({use.name for use in uses}) != len(uses):
        raise Invalid("secrets must not repeat", field="secrets")
    variables = [use.env for use in uses if use.env]
    if len(set(variables)) != len(variables) or not env.keys().isdisjoint(variables):
        raise Invalid("secrets must not set a variable that is set already", field="secrets")
    for name in variables:
        _variable(name, "secrets")


def _no_nul(text: str, field: str) -> None:
    if "\0" in text:
        raise Invalid(f"{field} must not contain NUL", field=field)


def unknown_sku(name: str, known: Sequence[str]) -> UnknownSku:
    """The failure that names the offers that are open, up to a few."""
    more = ", …" if len(known) > SKUS_NAMED_MAX else ""
    there_are = f"; there are {', '.join(known[:SKUS_NAMED_MAX])}{more}" if known else ", nor any other"
    return UnknownSku(f"there is no SKU {name}{there_are}", field="sku")


def shape(offer: Sku, *, name: str, gpus: int) -> Sku:
    """The offer itself, when it comes in this size."""
    if gpus not in offer.gpu_counts:
        allowed = ", ".join(map(str, offer.gpu_counts))
        raise BadGpuCount(
            f"gpus must be one of {allowed} for SKU {name}; the max is {max(offer.gpu_counts)}", field="gpus"
        )
    return offer

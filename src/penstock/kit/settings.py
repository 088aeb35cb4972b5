"""Typed settings of one process: a TOML file first, the environment over it.

Each process declares one frozen `msgspec.Struct`. `[section] field = …` in the file and `PENSTOCK_SECTION_FIELD` in
the environment set a field; shared fields (`SHARED`) are also read from the file's top level and from
`PENSTOCK_FIELD`. A variable that is set but empty counts as unset.
"""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from penstock.kit.errors import Invalid

T = TypeVar("T", bound=msgspec.Struct)

#: Fields that several processes share, set once for all of them.
SHARED: Final = frozenset(
    {
        "database_url",
        "nats_url",
        "temporal_address",
        "temporal_namespace",
        "pki_dir",
        "secrets_dir",
        "objects_url",
        "objects_endpoint",
        "objects_region",
        "objects_access_key_id",
        "objects_secret_access_key",
        "object_bytes_max",
        "project_object_bytes_max",
        "payments_provider",
        "payments_webhook_secret",
        "payments_webhook_secret_previous",
        "payments_webhook_previous_until",
        "payments_success_url",
        "payments_cancel_url",
        "refund_window_days",
        "stripe_api_key",
        "stripe_api_base",
        "api_url",
        "gateway_url",
        "link_url",
        "nodes_nats_url",
        "otlp_endpoint",
        "log_level",
        "log_format",
        "trusted_proxies",
        "allowed_origins",
        "heartbeat_s",
        "waiting_max_per_project",
    }
)
#: Sections of the file: the processes, and what the commands beside them read.
SECTIONS: Final = frozenset({"api", "gateway", "worker", "relay", "biller", "activator", "agent", "sidecar", "db"})
FILE_BYTES_MAX: Final = 1 << 20


def load(cls: type[T], section: str, environ: Mapping[str, str]) -> T:
    """The settings of `section`, or Invalid naming the offending field."""
    document = read_toml(environ.get("PENSTOCK_CONFIG", ""))
    check_top_level(document)
    names = cls.__struct_fields__
    values: dict[str, Any] = {name: document[name] for name in names if name in SHARED and name in document}
    values |= document.get(section, {})
    values |= _from_environment(names, section, environ)
    return convert(values, cls, section)


def convert(values: Mapping[str, Any], cls: type[T], section: str) -> T:
    """Check `values` against the struct; unknown and missing names and wrong types are named."""
    unknown = sorted(set(values) - set(cls.__struct_fields__))
    if unknown:
        name = f"{section}.{unknown[0]}"
        raise Invalid(f"unknown setting {name}{_meant(unknown[0], cls.__struct_fields__)}", field=name)
    for known in msgspec.structs.fields(cls):
        if known.required and known.name not in values:
            name = f"{section}.{known.name}"
            raise Invalid(f"setting {name} is missing: set {_variable(known.name, section)}", field=name)
    try:
        return msgspec.convert(dict(values), cls, strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(f"setting {section}: {error}", field=section) from error


def check_top_level(document: Mapping[str, Any]) -> None:
    """Refuse a name at the file's top level that nobody reads, and a section that is none."""
    for name, value in document.items():
        if name not in SHARED and name not in SECTIONS:
            raise Invalid(f"unknown setting {name}{_meant(name, [*SHARED, *SECTIONS])}", field=name)
        if (name in SECTIONS) != isinstance(value, dict):
            wanted = f"a section: write [{name}]" if name in SECTIONS else "one value"
            raise Invalid(f"setting {name} must be {wanted}", field=name)


def _meant(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), 1, 0.5)
    return f"; did you mean {close[0]}?" if close else ""


def read_toml(path: str) -> dict[str, Any]:
    """The parsed file; an empty path means no file."""
    if not path:
        return {}
    file = Path(path)
    try:
        if file.stat().st_size > FILE_BYTES_MAX:
            raise Invalid(f"{path} is larger than {FILE_BYTES_MAX} bytes", field="config")
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise Invalid(f"cannot read {path}: {error.strerror}", field="config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"{path} is not valid TOML: {error}", field="config") from error


def _variable(name: str, section: str) -> str:
    return f"PENSTOCK_{name.upper()}" if name in SHARED else f"PENSTOCK_{section.upper()}_{name.upper()}"


def _from_environment(names: tuple[str, ...], section: str, environ: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        if name in SHARED and (value := environ.get(f"PENSTOCK_{name.upper()}", "")):
            found[name] = value
        if value := environ.get(f"PENSTOCK_{section.upper()}_{name.upper()}", ""):
            found[name] = value
    return found

"""Which server, which key, which project: flag, then environment, then profile, then the local instance.

Each value remembers its source. A stored key goes only to the server that it was stored for: an address from a flag
or the environment never receives the key of a profile or of the local instance with another address. A variable that
is set but empty counts as unset.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from penstock.cli.errors import CliError
from penstock.cli.local import Instance, data_folder, instance
from penstock.cli.profiles import ConfigFile, Profile, config_path, read
from penstock.sdk.errors import InvalidArgument
from penstock.sdk.target import base_url


@dataclass(frozen=True, slots=True)
class Flags:
    """What the command line says."""

    api_url: str | None = None
    project: str | None = None
    profile: str | None = None
    data: str | None = None


_LOCAL: Final = "local instance in"


@dataclass(frozen=True, slots=True)
class Value:
    """A value and where it comes from."""

    text: str = field(repr=False)
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Everything that a call needs; none where nobody said."""

    profile: Value | None
    api_url: Value | None
    gateway_url: Value | None
    key: Value | None
    project: Value | None
    config_file: Path | None
    data_folder: Path | None

    @property
    def is_local(self) -> bool:
        """Whether the address is this machine's own, as its running instance said."""
        return self.api_url is not None and self.api_url.source.startswith(_LOCAL)


def resolve(flags: Flags, environ: Mapping[str, str]) -> Resolved:
    """Look everywhere, in order."""
    path, file = _file(environ)
    name, profile = _profile(flags, environ, file)
    stored = f"profile {name.text}" if name else ""
    folder = _folder(flags, environ)
    running = instance(folder) if folder else None
    local = f"{_LOCAL} {folder}"

    api_url = _first(
        (flags.api_url, "flag --api-url"),
        _variable(environ, "PENSTOCK_API_URL"),
        (profile.api_url, stored),
        (running.api if running else None, local),
    )
    api_url = _normal(api_url, "api_url")
    from_profile = _belongs(profile.api_url, api_url)
    mine = running if running and _belongs(running.api, api_url) else None
    return Resolved(
        profile=name,
        api_url=api_url,
        gateway_url=_normal(
            _first(
                _variable(environ, "PENSTOCK_GATEWAY_URL"),
                (profile.gateway_url if from_profile else None, stored),
                (mine.gateway if mine else None, local),
            ),
            "gateway_url",
        ),
        key=_first(
            _variable(environ, "PENSTOCK_API_KEY"),
            (profile.key if from_profile else None, stored),
            (mine.key if mine else None, local),
        ),
        project=_first(
            (flags.project, "flag --project"), _variable(environ, "PENSTOCK_PROJECT"), (profile.project, stored)
        ),
        config_file=path,
        data_folder=folder,
    )


def _file(environ: Mapping[str, str]) -> tuple[Path | None, ConfigFile]:
    try:
        path = config_path(environ)
    except CliError:
        # Without a home there is no file; flags, variables and `--data` may still say everything.
        return None, ConfigFile()
    return path, read(path)


def _folder(flags: Flags, environ: Mapping[str, str]) -> Path | None:
    try:
        return data_folder(flags.data, environ)
    except CliError:
        return None


def _profile(flags: Flags, environ: Mapping[str, str], file: ConfigFile) -> tuple[Value | None, Profile]:
    asked = _first((flags.profile, "flag --profile"), _variable(environ, "PENSTOCK_PROFILE"))
    name = asked or Value(file.current, "configuration file")
    if name.text in file.profiles:
        return name, file.profiles[name.text]
    if asked:
        known = ", ".join(file.profiles) or "none yet"
        raise CliError(f"no profile {asked.text!r}; there are: {known}", code="no_profile", field="profile")
    return None, Profile()


def _variable(environ: Mapping[str, str], name: str) -> tuple[str | None, str]:
    return environ.get(name), f"environment {name}"


def _first(*candidates: tuple[str | None, str]) -> Value | None:
    return next((Value(text, source) for text, source in candidates if text), None)


def _normal(value: Value | None, name: str) -> Value | None:
    if value is None:
        return None
    try:
        return Value(base_url(value.text, name=name), value.source)
    except InvalidArgument as error:
        raise CliError(f"{error.message} ({value.source})", code="config", field=name) from error


def _belongs(own: str | None, api_url: Value | None) -> bool:
    """Whether secrets stored with the address `own` may be sent to `api_url`."""
    if own is None or api_url is None:
        return True
    try:
        return base_url(own, name="api_url") == api_url.text
    except InvalidArgument:
        return False


def local_instance(flags: Flags, environ: Mapping[str, str]) -> Instance:
    """The local instance, or a CliError that says how to start one."""
    folder = data_folder(flags.data, environ)
    running = instance(folder)
    if running is None:
        raise CliError(f"no local instance in {folder}", code="no_instance", next_step="start one with `penstock up`")
    return running

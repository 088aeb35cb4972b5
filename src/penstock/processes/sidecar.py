"""The sidecar: the only process on a node that talks to the queue, for all of the node's workers, and the only one that
knows their keys. It runs as a user of its own, so that neither a unit nor another one's credentials can reach the rest.

It starts as root, makes its socket, and becomes that user before the first word with anybody. From then on its own
program files may be out of its reach: everything is imported by then.
"""

import asyncio
import ctypes
import encodings.idna
import os
import socket
import ssl
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec
import nats.js.client
from msgspec import Meta
from prometheus_client import Gauge

from penstock.kit import dialling, process, settings
from penstock.kit.errors import Invalid
from penstock.kit.telemetry import logger
from penstock.node.sidecar import reach, roster
from penstock.node.sidecar.gateway import Attempts
from penstock.node.sidecar.roster import Roster
from penstock.node.sidecar.worker import Surroundings

_log = logger(__name__)
_workers = Gauge("penstock_sidecar_units", "Units that are served.")
_PR_SET_PDEATHSIG: Final = 1
_PR_GET_PDEATHSIG: Final = 2
_PR_SET_DUMPABLE: Final = 4
_PR_SET_NO_NEW_PRIVS: Final = 38
_MODULES: Final = (encodings.idna, nats.js.client)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the sidecar needs to know. `nats_url` carries no credentials: each worker has its own. `nats_ca_file` has
    the one authority that is trusted there; without it, the system's are. `uid` and `gid` are whom it becomes when it
    starts as root; without them it stays what it is."""

    nats_url: str
    nats_ca_file: str = ""
    gateway_url: str
    socket: str
    uid: Annotated[int, Meta(ge=0, le=4_000_000_000)] = 0
    gid: Annotated[int, Meta(ge=0, le=4_000_000_000)] = 0
    #: Workers report so often.
    report_s: Annotated[float, Meta(ge=0.1, le=60)] = 3.0
    otlp_endpoint: str = ""
    log_level: str = "info"
    log_format: str = "json"
    ops_port: int = 9107


async def body(
    stack: AsyncExitStack,
    settings: Settings,
    listener: socket.socket,
    agents: frozenset[int],
    nats_tls: ssl.SSLContext | None = None,
) -> None:
    """Run until cancelled."""
    await process.serve_ops(stack, settings.ops_port)
    session = await stack.enter_async_context(aiohttp.ClientSession(connector=dialling.connector()))
    around = Surroundings(
        nats_url=settings.nats_url,
        nats_tls=nats_tls,
        gateway=Attempts(session, settings.gateway_url),
        report_s=settings.report_s,
    )
    served = Roster(listener, agents, around)
    _workers.set_function(lambda: len(served))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(served.run())
        tasks.create_task(reach.watch(settings.nats_url, nats_tls, served.reaches))


def become(uid: int, gid: int) -> None:
    """Another user for good, whom no program file and no signal of others makes more of."""
    if os.geteuid() == 0 and uid:
        ends_with_parent = _ends_with_parent()
        os.setgroups([])
        os.setresgid(gid or uid, gid or uid, gid or uid)
        os.setresuid(uid, uid, uid)
        if ends_with_parent:
            # A change of user takes this setting back.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ends_with_parent, 0, 0, 0)
        _log.info("privileges_dropped", uid=os.geteuid(), gid=os.getegid())
    elif uid and uid != os.geteuid():
        raise Invalid(f"only root can become the user {uid}", field="sidecar.uid")
    else:
        _log.warning("privileges_kept", uid=os.geteuid(), note="the sidecar runs as the user that started it")
    os.chdir("/")
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        for option, value in ((_PR_SET_NO_NEW_PRIVS, 1), (_PR_SET_DUMPABLE, 0)):
            if libc.prctl(option, value, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "the kernel does not let the sidecar give its privileges up")


def _ends_with_parent() -> int:
    """The signal that comes when whoever started us ends; none if nobody asked for one."""
    found = ctypes.c_int(0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(found), 0, 0, 0)
    return found.value


async def _start(stack: AsyncExitStack, settings: Settings) -> None:
    if urlsplit(settings.nats_url).username is not None:
        raise Invalid("the address carries credentials, but every worker has its own", field="sidecar.nats_url")
    agents = frozenset({0, os.geteuid()})
    listener = roster.bind(Path(settings.socket).absolute())
    stack.callback(listener.close)
    # The file may be root's alone.
    nats_tls = trust(settings)
    become(settings.uid, settings.gid)
    await body(stack, settings, listener, agents, nats_tls)


def encrypted(nats_url: str) -> bool:
    """Whether connections there are."""
    return nats_url.startswith(("tls://", "wss://"))


def trust(settings: Settings) -> ssl.SSLContext | None:
    """Whom to believe at an address with TLS; nothing for one without."""
    if not encrypted(settings.nats_url):
        if settings.nats_ca_file:
            raise Invalid("an authority is given, but the address is without TLS", field="sidecar.nats_url")
        return None
    try:
        context = ssl.create_default_context(cafile=settings.nats_ca_file or None)
    except OSError as error:
        detail = f"cannot read the authority in {settings.nats_ca_file}: {error.strerror or error}"
        raise Invalid(detail, field="sidecar.nats_ca_file") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def main() -> None:
    """Run the process."""
    loaded = settings.load(Settings, "sidecar", os.environ)
    process.allow_many_files()
    process.main(
        "sidecar",
        lambda stack: _start(stack, loaded),
        level=loaded.log_level,
        log_format=loaded.log_format,
        otlp_endpoint=loaded.otlp_endpoint,
    )


if __name__ == "__main__":
    main()

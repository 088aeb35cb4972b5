"""Postgres, NATS and Temporal for one install: given by the environment, or embedded in the data folder."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.embedded import nats, postgres, temporal
from penstock.embedded.ports import free_port
from penstock.embedded.server import Server
from penstock.kit.errors import Unavailable
from penstock.processes.up import programs
from penstock.processes.up.display import Display
from penstock.processes.up.endpoints import HOST
from penstock.processes.up.folder import DataFolder, Ports
from penstock.processes.up.supervisor import Supervisor

NAMES: Final = ("postgres", "nats", "temporal")
#: A port that was free may be taken by the time a server listens on it.
_TRIES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Where they are. `temporal_ui` is empty when Temporal is not ours."""

    database_url: str
    nats_url: str
    temporal_address: str
    temporal_ui: str


class Starter:
    """Starts those that the environment does not name."""

    def __init__(
        self,
        folder: DataFolder,
        supervisor: Supervisor,
        display: Display,
        environ: Mapping[str, str],
        ports: Ports,
    ) -> None:
        self._folder = folder
        self._ports = ports
        self._supervisor = supervisor
        self._display = display
        self._environ = environ
        self._temporal_ui = ""

    async def start(self, prepare_database: Callable[[str], Awaitable[None]]) -> Servers:
        """All three together; the database is prepared while the others still start."""
        database_url, nats_url, temporal_address = await asyncio.gather(
            self._database(prepare_database),
            self._given_or("PENSTOCK_NATS_URL", "nats", self._nats),
            self._given_or("PENSTOCK_TEMPORAL_ADDRESS", "temporal", self._temporal),
        )
        return Servers(
            database_url=database_url,
            nats_url=nats_url,
            temporal_address=temporal_address,
            temporal_ui=self._temporal_ui,
        )

    async def _database(self, prepare: Callable[[str], Awaitable[None]]) -> str:
        url = await self._given_or("PENSTOCK_DATABASE_URL", "postgres", self._postgres)
        async with self._display.step("database schema"):
            await prepare(url)
        return url

    async def _given_or(self, variable: str, name: str, prepare: Callable[[], Awaitable[Server]]) -> str:
        if given := self._environ.get(variable, ""):
            self._display.say(f"{name}: {variable} is set, none is started")
            return given
        async with self._display.step(name):
            return await self._launch(prepare)

    async def _launch(self, prepare: Callable[[], Awaitable[Server]]) -> str:
        for attempt in range(1, _TRIES + 1):
            server = await prepare()
            try:
                await self._supervisor.launch(programs.of_server(server, self._folder))
            except Unavailable:
                if attempt == _TRIES:
                    raise
            else:
                return server.url
        raise AssertionError("unreachable")

    async def _postgres(self) -> Server:
        folder = self._folder
        return await postgres.prepare(folder.path / "postgres", free_port(), programs.log_of(folder, "postgres"))

    async def _nats(self) -> Server:
        folder = self._folder
        return nats.prepare(folder.path / "nats", free_port(), programs.log_of(folder, "nats"), self._outside())

    def _outside(self) -> nats.Outside | None:
        """For sidecars of other nodes, who trust the CA of the link anyway."""
        if self._ports.host == HOST:
            return None
        pki = self._folder.pki
        return nats.Outside(
            host=self._ports.host, port=self._ports.nats, certificate=pki / "gateway.crt", key=pki / "gateway.key"
        )

    async def _temporal(self) -> Server:
        folder, ui_port = self._folder, free_port()
        self._temporal_ui = f"http://{HOST}:{ui_port}"
        return temporal.prepare(folder.path / "temporal", free_port(), ui_port, programs.log_of(folder, "temporal"))

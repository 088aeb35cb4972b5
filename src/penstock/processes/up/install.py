"""One install, from an empty folder to ready, and back to nothing running."""

import asyncio
import os
from collections.abc import Mapping
from typing import Final

from penstock.embedded.child import rotate
from penstock.fleet import pki
from penstock.kit.errors import Conflict
from penstock.processes.up import database, leftovers, localnode, programs, servers, tenant, trial
from penstock.processes.up.banner import Ready
from penstock.processes.up.display import Display
from penstock.processes.up.endpoints import HOST, Wanted, choose
from penstock.processes.up.folder import DataFolder, Instance, Status, Trial
from penstock.processes.up.programs import CONTROL, NODE, Addresses
from penstock.processes.up.servers import Servers, Starter
from penstock.processes.up.supervisor import Program, Supervisor
from penstock.sdk.client import AsyncClient
from penstock.sdk.errors import Denied, Unauthenticated
from penstock.secrets import keyring
from penstock.wire.rest import Node, Sku

_ROTATE_EVERY_S: Final = 30.0


class KeyRefused(Conflict):
    """Somebody revoked the key that this install uses itself."""

    code = "up.admin_key_refused"


class Install:
    """Starts and stops the programs of one data folder, and keeps status.json true."""

    def __init__(self, folder: DataFolder, wanted: Wanted, display: Display, environ: Mapping[str, str]) -> None:
        self._folder = folder
        self._display = display
        self._environ = environ
        self._ports, self._notes = choose(wanted, folder.ports())
        self._supervisor = Supervisor(self._changed, display.say)
        self._instance: Instance | None = None
        self._simulated_gpus = 0
        self._trial: Trial | None = None
        self._complete = False

    async def start(self) -> Ready:
        """Bring everything up; returns when an allocation could be made."""
        await leftovers.clear(self._folder.path, grace_s=5.0)
        self._folder.save_ports(self._ports)
        for note in self._notes:
            self._display.say(note)
        async with self._display.live():
            running = await self._start_servers()
            addresses = Addresses(
                database_url=running.database_url,
                nats_url=running.nats_url,
                temporal_address=running.temporal_address,
                ports=self._ports,
                nodes_nats_url=programs.nodes_nats_url(self._ports, self._environ),
            )
            wanted = {name: programs.control(name, self._folder, addresses, self._environ) for name in CONTROL}
            wanted["sidecar"] = programs.sidecar(self._folder, addresses, self._environ)
            await asyncio.gather(*(self._launch(name, program) for name, program in wanted.items()))
            instance = self._save_instance(addresses, running)
            async with self._display.step("local node"):
                node, skus = await self._start_node(addresses, instance)
        self._simulated_gpus = localnode.simulated_gpus(node)
        self._trial = trial.choose(skus, node.gpus)
        self._complete = True
        self._changed()
        return Ready(instance=instance, simulated_gpus=self._simulated_gpus, notes=self._notes, trial=self._trial)

    async def _start_servers(self) -> Servers:
        ours = not self._environ.get("PENSTOCK_DATABASE_URL", "")

        async def prepare(url: str) -> None:
            await database.prepare(url, self._folder, ours=ours)

        await asyncio.to_thread(self._make_keys)
        starter = Starter(self._folder, self._supervisor, self._display, self._environ, self._ports)
        return await starter.start(prepare)

    def _make_keys(self) -> None:
        pki.init(self._folder.pki, [*{HOST, self._ports.host}, "localhost"])
        if not self._environ.get("PENSTOCK_SECRETS_DIR", ""):
            keyring.init(self._folder.secrets)

    async def _launch(self, name: str, program: Program) -> None:
        async with self._display.step(name):
            await self._supervisor.launch(program)

    async def _start_node(self, addresses: Addresses, instance: Instance) -> tuple[Node, list[Sku]]:
        """The local node once it is ready, and what is offered."""
        async with AsyncClient(instance.api, instance.key, allow_http=True) as client:
            try:
                before = await localnode.prepare(client, self._folder)
            except (Unauthenticated, Denied) as error:
                raise KeyRefused(
                    f"the administrator's key in {self._folder.admin_key} is no longer accepted;"
                    " delete the file, and the next start makes a new key"
                ) from error
            environment = await asyncio.to_thread(tenant.environment, self._folder)
            await self._supervisor.launch(
                programs.agent(self._folder, addresses, self._environ, enrolment=before.token, tenant=environment)
            )
            node = await localnode.until_ready(client, before)
            return node, [sku async for sku in client.skus.list()]

    def _save_instance(self, addresses: Addresses, running: Servers) -> Instance:
        self._instance = Instance(
            api=addresses.api,
            gateway=addresses.gateway,
            key=self._folder.admin_key.read_text().strip(),
            pid=os.getpid(),
            temporal_ui=running.temporal_ui,
            nats=addresses.nodes_nats_url,
            database_url=addresses.database_url,
            secrets_dir=self._environ.get("PENSTOCK_SECRETS_DIR", "") or str(self._folder.secrets),
        )
        self._folder.save_instance(self._instance)
        return self._instance

    async def keep_logs_bounded(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(_ROTATE_EVERY_S)
            for log in self._folder.log.glob("*.log"):
                await asyncio.to_thread(rotate, log)

    async def stop(self) -> None:
        """The agent with its units first and its sidecar, then those that use the servers, then the servers; nothing
        stays."""
        self._complete = False
        for names in (*((name,) for name in NODE), CONTROL, servers.NAMES):
            await self._supervisor.stop(names)
        self._supervisor.close()
        await leftovers.clear(self._folder.path, grace_s=2.0)
        await leftovers.end_units(self._folder)
        self._folder.forget()

    def kill(self) -> None:
        """End every child at once."""
        self._supervisor.kill()

    def _changed(self) -> None:
        status = Status(
            ready=self._complete and self._supervisor.ready,
            api=self._instance.api if self._instance else "",
            gateway=self._instance.gateway if self._instance else "",
            processes=self._supervisor.statuses(),
            pid=os.getpid(),
            notes=self._notes,
            simulated_gpus=self._simulated_gpus,
            trial=self._trial,
        )
        try:
            self._folder.save_status(status)
        except OSError as error:
            # A full disk must not end the watch over what still runs.
            self._display.say(f"cannot write status.json: {error.strerror}")

"""Temporal's development server, tuned: its defaults hold every saga to 20 polls a second."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client
from temporalio.service import RPCError

from penstock.embedded import binaries, child
from penstock.embedded.child import Child

_DYNAMIC: Final = {
    "history.transferProcessorMaxPollRPS": "2000",
    "history.timerProcessorMaxPollRPS": "2000",
    "history.visibilityProcessorMaxPollRPS": "200",
    "matching.numTaskqueueReadPartitions": "1",
    "matching.numTaskqueueWritePartitions": "1",
    "system.enableEagerWorkflowStart": "true",
}


@asynccontextmanager
async def run(folder: Path, port: int, ui_port: int, log: Path) -> AsyncIterator[tuple[str, Child]]:
    """Start on `folder`; yields the address. Stops it at the end."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    dynamic = [part for name, value in _DYNAMIC.items() for part in ("--dynamic-config-value", f"{name}={value}")]
    server = await child.start(
        "temporal",
        [binaries.temporal(), "server", "start-dev", "--ip", "127.0.0.1", "--port", str(port)]
        + ["--ui-port", str(ui_port), "--metrics-port", str(child.free_port()), "--db-filename", folder / "temporal.db"]
        + ["--sqlite-pragma", "journal_mode=wal", "--sqlite-pragma", "synchronous=1", "--log-level", "error", *dynamic],
        log=log,
        env={"HOME": str(folder), "TEMPORAL_DISABLE_UPDATE_CHECK": "1"},
    )
    address = f"127.0.0.1:{port}"
    try:
        await server.wait_until(lambda: _answers(address, port), timeout_s=60)
        yield address, server
    finally:
        await asyncio.shield(server.stop())


async def _answers(address: str, port: int) -> bool:
    if not child.listening(port):
        return False
    try:
        client = await Client.connect(address)
        await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace="default"))
    except (RPCError, RuntimeError):
        return False
    return True

"""The relay: outbox → JetStream, the audit log's chains, and the sweeps of what has served its time."""

import asyncio
import os
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from penstock.kit import auditchain, bus, db, process, retention, settings
from penstock.kit.bus import EVENTS
from penstock.kit.db import Database
from penstock.kit.relay import Relay, measure
from penstock.kit.streamguard import StreamGuard
from penstock.kit.telemetry import logger

_log = logger(__name__)
_MEASURE_S: Final = 10.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the relay needs to know."""

    database_url: str
    nats_url: str
    otlp_endpoint: str = ""
    log_level: str = "info"
    log_format: str = "json"
    ops_port: int = 9104
    stream_check_s: Annotated[float, Meta(ge=0.1, le=60)] = 3.0
    audit_link_s: Annotated[float, Meta(ge=0.1, le=3600)] = 1.0
    sweep_every_s: Annotated[float, Meta(ge=1, le=86_400)] = 3600.0
    events_keep_days: Annotated[int, Meta(ge=1, le=3650)] = 30
    idempotency_keep_hours: Annotated[int, Meta(ge=24, le=24 * 365)] = 24


async def body(stack: AsyncExitStack, settings: Settings) -> None:
    """Run until cancelled. NATS may lose its store at any time: the stream is made again within seconds."""
    nats_bus = await stack.enter_async_context(bus.connect(settings.nats_url, name="relay"))
    database = await stack.enter_async_context(db.connect(settings.database_url, nats_bus.hint, name="relay"))
    await process.serve_ops(stack, settings.ops_port, healthy=lambda: nats_bus.client.is_connected)
    stream_exists = asyncio.Event()

    async def ensure_stream() -> None:
        if nats_bus.client.is_connected:
            await nats_bus.ensure_stream(EVENTS)
            stream_exists.set()

    relay = Relay(database, nats_bus, StreamGuard(nats_bus, database, EVENTS, ensure_stream))

    async def publish() -> None:
        await stream_exists.wait()
        await relay.run()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(process.every(settings.stream_check_s, ensure_stream, name="ensure_stream"))
        tasks.create_task(publish())
        tasks.create_task(process.every(_MEASURE_S, lambda: measure(database), name="measure"))
        tasks.create_task(process.every(settings.audit_link_s, lambda: auditchain.extend(database), name="audit_chain"))
        tasks.create_task(process.every(settings.sweep_every_s, lambda: _sweep(database, settings), name="retention"))


async def _sweep(database: Database, settings: Settings) -> None:
    swept = await retention.sweep(
        database,
        events=timedelta(days=settings.events_keep_days),
        idempotency_keys=timedelta(hours=settings.idempotency_keep_hours),
    )
    if swept.events or swept.idempotency_keys:
        _log.info("swept", events=swept.events, idempotency_keys=swept.idempotency_keys)


def main() -> None:
    """Run the process."""
    loaded = settings.load(Settings, "relay", os.environ)
    process.main(
        "relay",
        lambda stack: body(stack, loaded),
        level=loaded.log_level,
        log_format=loaded.log_format,
        otlp_endpoint=loaded.otlp_endpoint,
    )

"""Spans of one request reach the collector from a real process, under one trace."""

import asyncio
import os
import sys
from hashlib import sha256
from pathlib import Path

import aiohttp
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from conftest import Servers
from penstock.embedded.ports import free_port
from penstock.fleet import pki
from penstock.secrets import keyring
from waiting import attempts


async def test_a_request_is_traced_under_its_correlation_id(
    servers: Servers, database_url: str, tmp_path: Path
) -> None:
    pki.init(tmp_path, ["127.0.0.1"])
    spans: list[tuple[str, bytes]] = []

    async def collect(request: web.Request) -> web.Response:
        exported = ExportTraceServiceRequest.FromString(await request.read())
        for resource in exported.resource_spans:
            spans.extend((span.name, span.trace_id) for scope in resource.scope_spans for span in scope.spans)
        return web.Response()

    collector = web.Application()
    collector.add_routes([web.post("/v1/traces", collect)])
    runner = web.AppRunner(collector)
    await runner.setup()
    collector_port, api_port = free_port(), free_port()
    await web.TCPSite(runner, "127.0.0.1", collector_port).start()
    keyring.init(tmp_path / "secrets")
    api = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.command", "serve", "api"),
        env={
            **os.environ,
            "PENSTOCK_DATABASE_URL": database_url,
            "PENSTOCK_NATS_URL": servers.nats_url,
            "PENSTOCK_PKI_DIR": str(tmp_path),
            "PENSTOCK_SECRETS_DIR": str(tmp_path / "secrets"),
            "PENSTOCK_OBJECTS_URL": (tmp_path / "objects").as_uri(),
            "PENSTOCK_API_PORT": str(api_port),
            "PENSTOCK_API_OPS_PORT": "0",
            "PENSTOCK_OTLP_ENDPOINT": f"http://127.0.0.1:{collector_port}",
        },
    )
    try:
        await _ask(f"http://127.0.0.1:{api_port}/healthz", "cor_traced")
    finally:
        api.terminate()
        await asyncio.wait_for(api.wait(), 20)
        await runner.cleanup()
    assert ("api.request", sha256(b"cor_traced").digest()[:16]) in spans


async def _ask(url: str, correlation_id: str) -> None:
    async with aiohttp.ClientSession() as session:
        async for _ in attempts():
            try:
                async with session.get(url, headers={"X-Correlation-Id": correlation_id}) as answer:
                    assert answer.status == 200
                    return
            except aiohttp.ClientConnectionError:
                continue
    raise AssertionError("the api did not start")

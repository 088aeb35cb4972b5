"""An authenticated read against an empty route of the same server."""

from urllib.parse import urlsplit

from bench.figures import Figure, median_of_three, rate
from bench.load import requests_per_s
from bench.stack import running
from penstock import AsyncClient


async def run() -> list[Figure]:
    """Requests per second of `GET /api/v1/allocations/{id}` and of `GET /healthz`."""
    with running() as stack:
        async with AsyncClient(stack.api, stack.key) as client:
            allocation = await client.allocations.create("g1.1")
            await client.allocations.wait(allocation.id)
            address = urlsplit(stack.api)
            host, port = address.hostname or "127.0.0.1", address.port or 80
            path = f"/api/v1/allocations/{allocation.id}"
            key = {"Authorization": f"Bearer {stack.key}"}
            empty = await median_of_three(lambda: requests_per_s(host, port, "/healthz", {}))
            read = await median_of_three(lambda: requests_per_s(host, port, path, key))
            await client.allocations.release(allocation.id)
    return [rate("api.authenticated_get", read, "requests/s", empty, 0.4)]

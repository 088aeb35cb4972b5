"""An authenticated read against an empty route of the same server."""

from urllib.parse import urlsplit

from bench.figures import Figure, median_of_three, rate
from bench.load import requests_per_s
from bench.stack import running
from penstock import Client


async def run() -> list[Figure]:
    """Requests per second of `GET /api/v1/allocations/{id}` and of `GET /healthz`."""
    with running() as stack, Client(api_url=stack.api, key=stack.key) as client:
        allocation = client.allocations.create(sku="g1.1")
        client.allocations.wait(allocation.id, state="active")
        address = urlsplit(stack.api)
        host, port = address.hostname or "127.0.0.1", address.port or 80
        path = f"/api/v1/allocations/{allocation.id}"
        empty = await median_of_three(lambda: requests_per_s(host, port, "/healthz", {}))
        read = await median_of_three(lambda: requests_per_s(host, port, path, {"Authorization": f"Bearer {stack.key}"}))
        client.allocations.release(allocation.id)
    return [rate("api.authenticated_get", read, "requests/s", empty, 0.4)]

"""Ray Serve: a deployment that does nothing, over HTTP. Runs in Ray's own environment; prints one JSON object."""

import asyncio
import json
import logging
import os
import sys

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_SERVE_ENABLE_ACCESS_LOG", "0")

import ray
from http_load import measure
from ray import serve


@serve.deployment(max_ongoing_requests=64)
class Noop:
    async def __call__(self, _request):
        return {}


def main() -> None:
    port = int(sys.argv[1])
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"enable_access_log": False})
        serve.run(Noop.bind(), name="noop", route_prefix="/")
        print(json.dumps(asyncio.run(measure(f"http://127.0.0.1:{port}/"))))
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()

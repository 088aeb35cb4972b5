"""BentoML: a service that does nothing, over HTTP. Runs in BentoML's own environment; prints one JSON object."""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

os.environ.setdefault("BENTOML_DO_NOT_TRACK", "true")

import bentoml
from http_load import measure


@bentoml.service(workers=1, traffic={"timeout": 30}, logging={"access": {"enabled": False}})
class Noop:
    @bentoml.api
    async def noop(self) -> dict:
        return {}


def wait(url: str) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(url, timeout=1).read()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(url)


def main() -> None:
    port = sys.argv[1]
    command = [sys.executable, "-m", "bentoml", "serve", "bentoml_peer:Noop", "--port", port, "--host", "127.0.0.1"]
    server = subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait(f"http://127.0.0.1:{port}/readyz")
        print(json.dumps(asyncio.run(measure(f"http://127.0.0.1:{port}/noop"))))
    finally:
        server.terminate()
        server.wait(timeout=30)


if __name__ == "__main__":
    main()

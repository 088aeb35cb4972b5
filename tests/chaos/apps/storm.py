"""What is called while everything around it breaks. An answer says which attempt gave it."""

import os
import time

import penstock

app = penstock.App("storm")


@app.function(
    sku="g1.1",
    concurrency=4,
    workers_max=3,
    idle_s=2,
    timeout_s=60,
    retries=2,
    retry_for=[ValueError],
    retry_delay_s=0.1,
)
def work(do: str, seconds: float = 0) -> dict[str, object]:
    """`quick`, `nap`, `flaky` (fails at first), `fail` (always does)."""
    ran = penstock.current_invocation()
    print(ran.id, ran.attempt, flush=True)
    time.sleep(seconds)
    if do == "fail" or (do == "flaky" and ran.attempt == 1):
        raise ValueError(f"{ran.id} {ran.attempt}")
    return {"id": ran.id, "attempt": ran.attempt, "do": do}


@app.function(sku="g1.1", workers_max=2, idle_s=2, timeout_s=60)
def poison() -> None:
    """Ends its worker."""
    os._exit(1)

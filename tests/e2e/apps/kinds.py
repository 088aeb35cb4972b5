"""Functions of every kind, for the tests of the whole cloud."""

import asyncio
import time

import penstock

app = penstock.App("kinds")


@app.function(sku="g1.1", concurrency=8)
def square(x: int) -> int:
    print("squaring", x)
    return x * x


@app.function(sku="g1.1", concurrency=4)
async def slow(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


@app.function(sku="g1.1")
def count(n: int):
    for number in range(n):
        penstock.progress(number + 1, n)
        yield {"number": number}


@app.function(sku="g1.1", retries=2, retry_delay_s=0.05)
def flaky() -> int:
    attempt = penstock.current_invocation().attempt
    if attempt < 3:
        raise ConnectionError("not yet")
    return attempt


@app.function(sku="g1.1")
def boom(word: str) -> None:
    raise ValueError(word)


@app.function(sku="g1.1")
def outer(x: int) -> int:
    return square.remote(x) + 1


@app.function(sku="g1.1")
def big(megabytes: int) -> str:
    return "x" * (megabytes << 20)


@app.function(sku="g1.1")
def length(text: str) -> int:
    return len(text)


@app.cls(sku="g1.1", concurrency=2)
class Model:
    @penstock.enter()
    def load(self) -> None:
        self.loaded_at = time.time()

    @penstock.method()
    def when(self) -> float:
        return self.loaded_at

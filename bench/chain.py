"""The bare chain: what an invocation cannot do without, in one process and without a line of ours in between.

Insert a row, publish, fetch and acknowledge, publish, fetch and acknowledge, update the row.
"""

import asyncio
import secrets
import statistics
import time
from types import TracebackType
from typing import Self

import asyncpg
from nats.js.api import StreamConfig

from penstock.kit import bus
from penstock.kit.pull import Pull

IN_FLIGHT = 32
SINGLES = 300
SECONDS = 4.0
_PAYLOAD = b"x" * 256


class Chain:
    """The chain on given servers."""

    def __init__(self, database_url: str, nats_url: str) -> None:
        self._database_url = database_url
        self._nats_url = nats_url
        self._ended: dict[str, asyncio.Future[None]] = {}

    async def __aenter__(self) -> Self:
        self._pool = await asyncpg.create_pool(self._database_url, min_size=8, max_size=8)
        await self._pool.execute("create table if not exists public.chain (id text primary key, state text)")
        self._connecting = bus.connect(self._nats_url, name="chain")
        self._bus = await self._connecting.__aenter__()
        for name in ("one", "two"):
            await self._bus.js.add_stream(StreamConfig(name=f"CHAIN-{name}", subjects=[f"chain.{name}"]))
            await self._bus.js.add_consumer(f"CHAIN-{name}", durable_name="c", ack_policy="explicit")  # pyright: ignore[reportArgumentType]
        self._loops = [asyncio.create_task(self._first()), asyncio.create_task(self._second())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        for name in ("one", "two"):
            await self._bus.js.delete_stream(f"CHAIN-{name}")
        await self._connecting.__aexit__(None, None, None)
        await self._pool.close()

    async def _first(self) -> None:
        async with Pull(self._bus, stream="CHAIN-one", consumer="c", batch=64) as pull:
            while True:
                for message in await pull.take(64):
                    await message.ack()
                    await self._bus.js.publish("chain.two", message.data)

    async def _second(self) -> None:
        async with Pull(self._bus, stream="CHAIN-two", consumer="c", batch=64) as pull:
            while True:
                for message in await pull.take(64):
                    await message.ack()
                    self._ended.pop(message.data[:16].decode()).set_result(None)

    async def once(self) -> None:
        """One way through."""
        row = secrets.token_hex(8)
        done = self._ended[row] = asyncio.get_running_loop().create_future()
        await self._pool.execute("insert into public.chain values ($1, 'queued')", row)
        await self._bus.js.publish("chain.one", row.encode() + _PAYLOAD)
        await done
        await self._pool.execute("update public.chain set state = 'done' where id = $1", row)

    async def single_ms(self) -> float:
        """One at a time."""
        samples: list[float] = []
        for _ in range(SINGLES):
            began = time.perf_counter()
            await self.once()
            samples.append((time.perf_counter() - began) * 1000)
        return statistics.median(samples)

    async def per_s(self) -> float:
        """Many at a time."""
        ends, count = time.perf_counter() + SECONDS, 0

        async def work() -> None:
            nonlocal count
            while time.perf_counter() < ends:
                await self.once()
                count += 1

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
        return count / (time.perf_counter() - began)

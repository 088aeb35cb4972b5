"""Giving waiting invocations to workers: one statement for all functions that somebody pointed at since the last one.

A hint names a function, whatever it hints at: something came, a slot became free, a worker is ready. What cannot run
yet stays in its row and delays nobody: functions are taken in turn, one of each project, and a round takes so many of
each. A function whose slots are all taken is not looked at for each call that comes, but when a slot becomes free, and
now and then.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Final

from nats.aio.msg import Msg
from prometheus_client import Counter as Metric

from penstock.kit.db import Database
from penstock.kit.process import heed_cancellation
from penstock.kit.pull import InProgress
from penstock.serverless.model import Committed
from penstock.serverless.service.scaling import Scaler
from penstock.serverless.service.telling import Teller
from penstock.serverless.store import claims

_ROUND_FUNCTIONS_MAX: Final = 64
_EACH_MAX: Final = 16
_PARKED_MAX: Final = 1000
_FULL_S: Final = 0.02

_dispatched = Metric("penstock_dispatches", "Attempts given to workers")


class Dispatcher:
    """One activator's rounds."""

    def __init__(self, db: Database, teller: Teller, scaler: Scaler) -> None:
        self._db = db
        self._teller = teller
        self._scaler = scaler
        self._pointed: OrderedDict[str, int] = OrderedDict()
        self._heard: list[Msg] = []
        #: What was heard and is not acknowledged yet, which takes as long as the database is away.
        self.progress = InProgress()
        self._wake = asyncio.Event()
        #: Functions that had something due and no slot for it, when they were last looked at.
        self._full: set[str] = set()
        #: What came for these since.
        self._put_off: list[tuple[str, Msg]] = []

    def freed(self, rows: Iterable[Committed]) -> None:
        """Slots became free: look at the functions that something waits for. What came while the last one was being
        freed is not in its row, but its own round found no slot."""
        self.point({row.function_id for row in rows if row.more or row.waiting or row.function_id in self._full})

    def point(self, function_ids: Iterable[str], heard: Iterable[Msg] = ()) -> None:
        """Look at these in the next round, and acknowledge after it what was heard of them."""
        for function_id in function_ids:
            self._pointed[function_id] = self._pointed.get(function_id, 0) + 1
        for message in heard:
            self._heard.append(message)
            self.progress.hold(message)
        if self._pointed or self._heard:
            self._wake.set()

    def announced(self, function_id: str, message: Msg) -> None:
        """Something came for the function."""
        if function_id not in self._full:
            self.point([function_id], [message])
            return
        if not self._put_off:
            asyncio.get_running_loop().call_later(_FULL_S, self._look_again)
        self._put_off.append((function_id, message))
        self.progress.hold(message)

    def _look_again(self) -> None:
        put_off, self._put_off = self._put_off, []
        for function_id, message in put_off:
            self.point([function_id], [message])

    async def run(self) -> None:
        """Rounds for ever; a failure ends it, and whoever supervises begins again."""
        while True:
            await self._wake.wait()
            await self.round()
            heed_cancellation()

    async def round(self) -> None:
        """One statement, its dispatches, and then the acknowledgements."""
        self._wake.clear()
        taken = dict(self._pointed.popitem(last=False) for _ in range(min(len(self._pointed), _ROUND_FUNCTIONS_MAX)))
        heard, self._heard = self._heard, []
        if self._pointed:
            self._wake.set()
        try:
            await self._claim(taken)
        except BaseException:
            self.point(taken, heard)
            raise
        self.progress.let_go(*heard)
        for message in heard:
            await message.ack()

    async def _claim(self, hints: dict[str, int]) -> None:
        function_ids = list(hints)
        async with self._db.read() as conn:
            claimed = await claims.claim(conn, function_ids, each_max=_EACH_MAX)
        given = Counter(each.function_id for each in claimed)
        # Who has little to do does not wait for who has much.
        await self._teller.dispatch(sorted(claimed, key=lambda each: given[each.function_id]))
        _dispatched.inc(len(claimed))
        self._full -= {each.function_id for each in claimed if each.free > given[each.function_id]}
        await self._look_further(hints, given)

    async def _look_further(self, hints: dict[str, int], given: Counter[str]) -> None:
        """As many as a round takes: there may be more. Fewer than were hinted at: something may wait for a worker."""
        short: list[str] = []
        for function_id, hinted in hints.items():
            if given[function_id] >= _EACH_MAX:
                self.point([function_id] * max(1, hinted - given[function_id]))
            elif given[function_id] < hinted:
                short.append(function_id)
        if not short:
            return
        async with self._db.read() as conn:
            due = await claims.due(conn, short)
        self._full = self._full.difference(short).union(due)
        for function_id in due:
            self._scaler.look(function_id)

    async def sweep(self) -> None:
        """Point at everything that is due: what was parked, and what no hint came for."""
        async with self._db.read() as conn:
            self.point(await claims.parked(conn, limit=_PARKED_MAX))

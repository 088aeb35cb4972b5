"""The gateway's time as far as this node knows it. It decides whether a task has expired, the host's clock never."""

import asyncio
import time
from collections.abc import Callable
from datetime import datetime, timedelta


class ServerClock:
    """Server time carried forward by the monotonic clock since the last message that told it."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._told: tuple[datetime, float] | None = None
        #: Set once there is a server's time.
        self.known = asyncio.Event()

    def tell(self, server_time: datetime) -> None:
        """The server just said that it is `server_time`."""
        self._told = (server_time, self._monotonic())
        self.known.set()

    def now(self) -> datetime | None:
        """Server time now; None before the server told any."""
        if self._told is None:
            return None
        server_time, at = self._told
        return server_time + timedelta(seconds=self._monotonic() - at)

    def expired(self, deadline: datetime) -> bool:
        """Whether `deadline` has passed. Without a server's time nothing can be trusted to be fresh."""
        now = self.now()
        return now is None or now >= deadline

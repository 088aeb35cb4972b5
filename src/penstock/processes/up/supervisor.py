"""Keeps programs running: starts them, waits until they answer, starts them again when they end or stand still.

Our own processes send heartbeats from their event loops; servers are asked. One that is silent is named, then ended.

No crash of a child ends a watch. A program that never becomes ready is an error for who asked for it; one that was
ready once is started again for ever, with a bounded back-off.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

from penstock.embedded.child import Child
from penstock.kit.clock import backoff_s, utc_now
from penstock.kit.errors import PenstockError, Unavailable
from penstock.kit.heartbeat import Listener, Silence
from penstock.kit.telemetry import logger
from penstock.processes.up.folder import ProcessStatus

_log = logger(__name__)
#: A child that ran this long was healthy: its next crash starts the back-off over.
_STEADY_S: Final = 30.0
_BACKOFF_CAP_S: Final = 10.0
_FIRST_STARTS_MAX: Final = 3
#: Silent for so long, a program is named; for so long, it is ended.
UNRESPONSIVE_S: Final = 10.0
SILENT_MAX_S: Final = 30.0
_HEARTBEAT_LOOK_S: Final = 1.0
_ASK_EVERY_S: Final = 5.0
#: For the stacks of its threads, on their way to the log.
_LAST_WORDS_S: Final = 1.0


class State(StrEnum):
    """Where a watched program is."""

    STARTING = "starting"
    READY = "ready"
    UNRESPONSIVE = "unresponsive"
    WAITING = "waiting"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is watched. `start` gets variables for the child's environment. `alive` is asked of programs that send no
    heartbeats. The agent does not own its group: its units must survive a crash of it."""

    name: str
    start: Callable[[Mapping[str, str]], Awaitable[Child]]
    answers: Callable[[], Awaitable[bool]]
    heartbeats: bool = False
    alive: Callable[[], Awaitable[bool]] | None = None
    metrics: Callable[[], str] = str
    silent_max_s: float = SILENT_MAX_S
    ready_timeout_s: float = 60.0
    stop_signal: signal.Signals = signal.SIGTERM
    grace_s: float = 15.0
    owns_group: bool = True


class Watched:
    """One program under watch."""

    def __init__(
        self, program: Program, listener: Listener, changed: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        self.program = program
        self.restarts = 0
        self._listener = listener
        self._problem = ""
        self._silence = Silence(_HEARTBEAT_LOOK_S if program.heartbeats else _ASK_EVERY_S)
        self._changed = changed
        self._say = say
        self._state = State.STARTING
        self._since = utc_now()
        self._child: Child | None = None
        self._stopping = False
        self._was_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._watch(), name=f"watch {program.name}")

    @property
    def ready(self) -> bool:
        """Whether it answers, as far as we know."""
        return self._state is State.READY

    @property
    def pid(self) -> int | None:
        """Of the child that runs now."""
        return self._child.pid if self._child is not None and self._child.running else None

    def status(self) -> ProcessStatus:
        """As `penstock status` shows it."""
        return ProcessStatus(
            name=self.program.name,
            pid=self.pid,
            state=self._state.value,
            restarts=self.restarts,
            since=_timestamp(self._since),
            metrics=self.program.metrics() if self.pid is not None else "",
            problem=self._problem,
        )

    async def until_ready(self) -> None:
        """Return when it has answered for the first time; raise when its first starts all failed."""
        await asyncio.shield(self._was_ready)

    async def stop(self) -> None:
        """End the watch and the child."""
        self._stopping = True
        self._move(State.STOPPING)
        if self._child is not None:
            await self._child.stop(self.program.stop_signal, grace_s=self.program.grace_s)
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._child is not None:
            # A start that was under way when the stop began.
            await self._child.stop(self.program.stop_signal, grace_s=self.program.grace_s)
        if not self._was_ready.done():
            self._was_ready.cancel()
        self._move(State.STOPPED)

    def kill(self) -> None:
        """End the child at once."""
        if self._child is not None:
            self._child.kill()

    async def _watch(self) -> None:
        failures = 0
        while not self._stopping:
            began = asyncio.get_running_loop().time()
            reason = await self._run_once()
            if self._stopping:
                return
            steady = asyncio.get_running_loop().time() - began > _STEADY_S
            failures = 1 if steady else failures + 1
            if not self._was_ready.done() and failures >= _FIRST_STARTS_MAX:
                self._was_ready.set_exception(Unavailable(reason))
                return
            await self._pause(failures, reason)

    async def _run_once(self) -> str:
        """Start it and wait for its end; why it ended, in words."""
        try:
            await self._start_and_wait()
        except PenstockError as error:
            return error.detail
        except Exception as error:  # noqa: BLE001 (the watch outlives whatever one start does)
            _log.exception("start_failed", program=self.program.name)
            return f"{self.program.name} could not be started: {error!r}"
        finally:
            if not self._stopping:
                await self._clear()
        return f"{self.program.name} {self._child.ending if self._child else 'ended'}"

    async def _start_and_wait(self) -> None:
        self._move(State.STARTING)
        starting = asyncio.ensure_future(self.program.start(self._listener.environment(self.program.silent_max_s)))
        try:
            child = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # Whoever stops us must find the child that is on its way.
            self._child = await starting
            raise
        self._child = child
        self._changed()
        await child.wait_until(self.program.answers, timeout_s=self.program.ready_timeout_s)
        self._became_ready()
        await self._until_over(child)

    async def _until_over(self, child: Child) -> None:
        """Return when it has ended; raise when it was silent for too long."""
        loop = asyncio.get_running_loop()
        ended = asyncio.ensure_future(child.process.wait())
        self._silence.heard()
        try:
            while not ended.done():
                began = loop.time()
                await asyncio.wait((ended,), timeout=self._silence.tick_s)
                if not ended.done() and (self.program.heartbeats or self.program.alive is not None):
                    await self._look(child, began)
        finally:
            ended.cancel()

    async def _look(self, child: Child, began: float) -> None:
        if await self._answers():
            self._silence.heard()
        silent_s = self._silence.passed(asyncio.get_running_loop().time() - began)
        if silent_s > self.program.silent_max_s:
            await self._end_silent(child)
            raise Unavailable(f"{self.program.name} did not respond for {self.program.silent_max_s:.0f} s")
        if silent_s > UNRESPONSIVE_S and self._state is State.READY:
            self._problem = f"no sign of life for {UNRESPONSIVE_S:.0f} s"
            self._say(f"{self.program.name} (pid {child.pid}) does not respond")
            _log.warning("process_unresponsive", program=self.program.name, pid=child.pid)
            self._move(State.UNRESPONSIVE)
        elif silent_s <= UNRESPONSIVE_S and self._state is State.UNRESPONSIVE:
            self._move(State.READY)

    async def _answers(self) -> bool:
        """Whether a server without heartbeats answers. A question that fails is an answer that did not come."""
        if self.program.alive is None:
            return False
        try:
            return await self.program.alive()
        except Exception as error:  # noqa: BLE001 (the loop that supervises it)
            _log.warning("question_failed", program=self.program.name, error=repr(error))
            return False

    async def _end_silent(self, child: Child) -> None:
        """Have it say where it stands, then end it, with children that lead groups of their own."""
        _log.error("process_ended", program=self.program.name, pid=child.pid, reason="unresponsive")
        if self.program.heartbeats:
            child.abort()
            with suppress(TimeoutError):
                await asyncio.wait_for(child.process.wait(), _LAST_WORDS_S)
        if self.program.owns_group:
            child.kill_children()

    def heard(self) -> None:
        """A heartbeat of its process came."""
        self._silence.heard()

    def _became_ready(self) -> None:
        self._move(State.READY)
        if not self._was_ready.done():
            self._was_ready.set_result(None)

    async def _clear(self) -> None:
        """Leave nothing of a child that failed before the next one starts."""
        if self._child is None:
            return
        self._child.kill()
        await self._child.process.wait()
        if self.program.owns_group:
            self._child.kill_group()

    async def _pause(self, failures: int, reason: str) -> None:
        self.restarts += 1
        delay_s = backoff_s(failures - 1, base_s=0.2, cap_s=_BACKOFF_CAP_S)
        self._problem = reason
        self._say(f"{reason}; starting it again in {delay_s:.1f} s")
        self._move(State.WAITING)
        await asyncio.sleep(delay_s)

    def _move(self, state: State) -> None:
        self._state = state
        self._since = utc_now()
        self._changed()


class Supervisor:
    """All watched programs of one install."""

    def __init__(self, changed: Callable[[], None], say: Callable[[str], None]) -> None:
        self._changed = changed
        self._say = say
        self._watched: list[Watched] = []
        self._listener = Listener()
        self._listener.listen(self._heard)

    def _heard(self, pid: int) -> None:
        for watched in self._watched:
            if watched.pid == pid:
                watched.heard()

    @property
    def ready(self) -> bool:
        """Whether every program answers."""
        return bool(self._watched) and all(watched.ready for watched in self._watched)

    def statuses(self) -> list[ProcessStatus]:
        """Of all programs, in the order of their start."""
        return [watched.status() for watched in self._watched]

    async def launch(self, program: Program) -> Watched:
        """Watch it from now on; returns when it answers. One that never does is no longer watched."""
        watched = Watched(program, self._listener, self._changed, self._say)
        self._watched.append(watched)
        try:
            await watched.until_ready()
        except Unavailable:
            await watched.stop()
            self._watched.remove(watched)
            raise
        return watched

    async def stop(self, names: Iterable[str]) -> None:
        """Stop these programs together; those that do not run are no error."""
        wanted = set(names)
        stops = [watched.stop() for watched in self._watched if watched.program.name in wanted]
        await asyncio.gather(*stops)

    def close(self) -> None:
        """Hear nobody any more."""
        self._listener.close()

    def kill(self) -> None:
        """End every child at once."""
        for watched in self._watched:
            watched.kill()


def _timestamp(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")

"""The supervisor against real children that crash, hang and never start."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from penstock.embedded import child
from penstock.embedded.child import Child
from penstock.kit.errors import Unavailable
from penstock.kit.heartbeat import Heart, Silence
from penstock.processes.up import leftovers, supervisor
from penstock.processes.up.supervisor import Program, State, Supervisor, Watched
from waiting import attempts

_SLEEP = "import time; time.sleep(600)"
_DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


class Bench:
    """A supervisor whose programs are small Python scripts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.supervisor = Supervisor(lambda: None, self.said.append)
        self.starts = 0

    def program(self, name: str, script: str, *, answers: bool = True, **options: object) -> Program:
        async def start(given: Mapping[str, str]) -> Child:
            self.starts += 1
            environment = {**os.environ, **given, **leftovers.mark(self.folder)}
            command = [sys.executable, "-c", script, str(self.folder)]
            return await child.start(name, command, log=self.folder / f"{name}.log", env=environment)

        async def answer() -> bool:
            return answers

        return Program(name=name, start=start, answers=answer, **options)

    async def until(self, watched: Watched, *, restarts: int) -> None:
        async with asyncio.timeout(20):
            while watched.restarts < restarts or not watched.ready:
                await asyncio.sleep(0.01)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    yield made
    await made.supervisor.stop({status.name for status in made.supervisor.statuses()})
    made.supervisor.close()
    # What was killed with its group may take a moment to die.
    async with asyncio.timeout(30):
        while list(leftovers.marked(tmp_path)):
            await asyncio.sleep(0.01)


async def test_a_killed_child_is_started_again_and_said_so(bench: Bench) -> None:
    watched = await bench.supervisor.launch(bench.program("victim", _SLEEP))
    first = watched.pid
    watched.kill()
    await bench.until(watched, restarts=1)
    assert watched.pid != first
    assert bench.supervisor.ready
    assert any("victim was killed by SIGKILL; starting it again" in text for text in bench.said)
    assert watched.status().restarts == 1


async def test_a_child_that_keeps_crashing_is_started_again_more_slowly_for_ever(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays: list[int] = []
    monkeypatch.setattr(supervisor, "backoff_s", lambda attempt, **_: delays.append(attempt) or 0.01)
    watched = await bench.supervisor.launch(bench.program("crasher", "import time; time.sleep(0.02)"))
    await bench.until(watched, restarts=6)
    assert delays[:5] == [0, 1, 2, 3, 4]


async def test_one_that_never_starts_is_an_error_with_its_last_words(bench: Bench) -> None:
    program = bench.program("broken", "raise SystemExit('the disk is full')", answers=False)
    with pytest.raises(Unavailable, match="broken ended with code 1: the disk is full"):
        await bench.supervisor.launch(program)
    assert bench.starts == 3
    assert bench.supervisor.statuses() == []


async def test_one_that_never_answers_is_an_error_and_does_not_stay(bench: Bench) -> None:
    program = bench.program("mute", _SLEEP, answers=False, ready_timeout_s=0.1)
    with pytest.raises(Unavailable, match="mute was not ready"):
        await bench.supervisor.launch(program)
    assert list(leftovers.marked(bench.folder)) == []


async def test_one_that_ignores_the_signal_is_killed_after_its_grace(bench: Bench) -> None:
    watched = await bench.supervisor.launch(bench.program("deaf", _DEAF, grace_s=0.3))
    await _printed(bench.folder / "deaf.log", "deaf")
    await bench.supervisor.stop(["deaf"])
    assert watched.pid is None
    assert watched.restarts == 0
    assert watched.status().state == "stopped"


async def test_what_a_crashed_child_left_in_its_group_is_gone_before_the_next_starts(bench: Bench) -> None:
    script = (
        "import subprocess, sys, time\n"
        "grandchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(grandchild.pid, flush=True); time.sleep(600)"
    )
    watched = await bench.supervisor.launch(bench.program("parent", script))
    grandchild = int(await _printed(bench.folder / "parent.log", "\n"))
    watched.kill()
    await bench.until(watched, restarts=1)
    assert grandchild not in list(leftovers.marked(bench.folder))


async def test_a_program_whose_start_raises_does_not_end_the_watch(bench: Bench) -> None:
    program = bench.program("flaky", _SLEEP)
    failures = iter([RuntimeError("no luck"), OSError("still none")])

    async def start(given: Mapping[str, str]) -> Child:
        for failure in failures:
            raise failure
        return await program.start(given)

    watched = await bench.supervisor.launch(Program(name="flaky", start=start, answers=program.answers))
    assert watched.ready
    assert watched.restarts == 2


async def test_stopping_while_a_start_is_under_way_leaves_nothing(bench: Bench) -> None:
    program = bench.program("slow", _SLEEP, answers=False)
    launching = asyncio.create_task(bench.supervisor.launch(program))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await bench.supervisor.stop(["slow"])
    assert bench.starts == 1
    assert list(leftovers.marked(bench.folder)) == []
    launching.cancel()
    await asyncio.gather(launching, return_exceptions=True)


async def test_leftovers_are_found_by_their_mark_and_killed(tmp_path: Path) -> None:
    ours = await child.start("o", [sys.executable, "-c", _SLEEP], log=tmp_path / "o", env=leftovers.mark(tmp_path))
    other = leftovers.mark(tmp_path / "other")
    strangers = await child.start("s", [sys.executable, "-c", _SLEEP], log=tmp_path / "s", env=other)
    try:
        async with asyncio.timeout(30):
            while ours.pid not in list(leftovers.marked(tmp_path)):
                await asyncio.sleep(0.01)
        assert await leftovers.clear(tmp_path, grace_s=0.1) == [ours.pid]
        await ours.process.wait()
        assert strangers.running
    finally:
        await strangers.stop()
        await ours.stop()


async def _printed(log: Path, wanted: str) -> str:
    async with asyncio.timeout(30):
        while not log.exists() or wanted not in log.read_text():
            await asyncio.sleep(0.01)
    return log.read_text()


_BEATS = """
import asyncio, os
from contextlib import AsyncExitStack
from penstock.kit import process
async def body(stack: AsyncExitStack) -> None:
    await asyncio.sleep(600)
process.main("beats", body)
"""
_HANGS = _BEATS.replace("await asyncio.sleep(600)", "await asyncio.sleep(1); import time; time.sleep(600)")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of seconds, that tests need not wait for the real ones."""
    monkeypatch.setattr(supervisor, "UNRESPONSIVE_S", 2.0)
    monkeypatch.setattr(supervisor, "_HEARTBEAT_LOOK_S", 0.2)
    monkeypatch.setattr(supervisor, "_ASK_EVERY_S", 0.2)


async def _until_state(watched: Watched, state: State) -> None:
    async for _ in attempts():
        if watched.status().state == state.value:
            return
    pytest.fail(f"it is {watched.status()}")


@pytest.mark.usefixtures("impatient")
async def test_a_stopped_process_is_named_then_ended_and_started_again(bench: Bench) -> None:
    watched = await bench.supervisor.launch(bench.program("still", _BEATS, heartbeats=True, silent_max_s=4.0))
    first = watched.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    await _until_state(watched, State.UNRESPONSIVE)
    assert not bench.supervisor.ready
    assert any("does not respond" in text for text in bench.said)
    await bench.until(watched, restarts=1)
    assert watched.pid not in (None, first)
    assert "did not respond" in watched.status().problem
    # The next one beats, and stays.
    await asyncio.sleep(5)
    assert watched.restarts == 1
    assert watched.ready


@pytest.mark.usefixtures("impatient")
async def test_a_process_that_responds_again_in_time_goes_on(bench: Bench) -> None:
    watched = await bench.supervisor.launch(bench.program("pauses", _BEATS, heartbeats=True, silent_max_s=60.0))
    pid = watched.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await _until_state(watched, State.UNRESPONSIVE)
    os.kill(pid, signal.SIGCONT)
    await _until_state(watched, State.READY)
    assert (watched.pid, watched.restarts) == (pid, 0)


@pytest.mark.usefixtures("impatient")
async def test_a_loop_that_stands_still_is_ended_and_its_log_says_where(bench: Bench) -> None:
    watched = await bench.supervisor.launch(bench.program("hangs", _HANGS, heartbeats=True, silent_max_s=4.0))
    await bench.until(watched, restarts=1)
    assert "in body" in (bench.folder / "hangs.log").read_text()


@pytest.mark.usefixtures("impatient")
async def test_a_server_that_says_nothing_is_ended(bench: Bench) -> None:
    answers = [True]

    async def alive() -> bool:
        return answers[0]

    watched = await bench.supervisor.launch(bench.program("server", _SLEEP, alive=alive, silent_max_s=1.0))
    await asyncio.sleep(1.5)
    assert watched.restarts == 0
    answers[0] = False
    async for _ in attempts():
        if watched.restarts:
            break
    answers[0] = True
    await bench.until(watched, restarts=1)


async def test_time_in_which_the_supervisor_stood_still_does_not_count() -> None:
    silence = Silence(1.0)
    assert silence.passed(8 * 3600.0) == 2.0
    assert silence.passed(1.0) == 3.0
    silence.heard()
    assert silence.passed(0.5) == 0.5


async def test_nobody_else_can_beat_for_a_process(bench: Bench) -> None:
    watched = await bench.supervisor.launch(bench.program("quiet", _SLEEP, heartbeats=True))
    heard: list[None] = []
    watched.heard = lambda: heard.append(None)  # type: ignore[method-assign]
    environment = bench.supervisor._listener.environment(1.0)
    beating = asyncio.create_task(Heart(environment).beat())
    await asyncio.sleep(0.5)
    assert not heard
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)

"""Catching up: a run is never larger than one transaction can be, however much there is to charge."""

from datetime import timedelta

import pytest

from integration.billing.stage import MINUTE, T0, Stage
from penstock.billing.service import accrue


async def test_ten_windows_are_charged_at_once_where_that_is_little(stage: Stage) -> None:
    await stage.start(T0)
    run = await stage.accrue(T0 + 10 * MINUTE)
    assert run is not None
    assert (run.windows, run.behind) == (10, False)


async def test_the_more_allocations_there_are_the_fewer_windows_are_charged_at_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accrue, "USES_MAX", 12)
    for _ in range(4):
        await stage.start(T0)
    windows: list[int] = []
    behind = True
    while behind:
        run = await stage.accrue(T0 + 10 * MINUTE)
        assert run is not None
        windows.append(run.windows)
        behind = run.behind
    assert windows == [12, 12, 12, 4]
    await stage.holds(T0 + 10 * MINUTE)


async def test_one_window_is_charged_even_of_more_than_that(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accrue, "USES_MAX", 1)
    for _ in range(2):
        await stage.start(T0)
    run = await stage.accrue(T0 + 3 * MINUTE + timedelta(seconds=1))
    assert run is not None
    assert (run.until, run.windows, run.behind) == (T0 + MINUTE, 2, True)

"""Why an invocation waits, in words."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock.serverless.definitions import Deployed
from penstock.serverless.model import Invocation, Limits, Mode, State
from penstock.serverless.service.invocations import raw_body
from penstock.serverless.waiting import Standing, waiting_for
from penstock.wire.rest import FunctionPut

NOW = datetime(2026, 11, 16, 7, tzinfo=UTC)
_EMPTY: dict[str, Any] = dict.fromkeys(Invocation.__dataclass_fields__)
WAITING = Invocation(
    **_EMPTY
    | {"function_id": "f", "mode": Mode.ASYNC, "state": State.QUEUED, "waiting": True, "due_at": NOW, "attempt": 0}
)
IDLE = Standing(now=NOW, reason="", ready=0, starting=0, slots=0, free=0)


@pytest.mark.parametrize(
    ("it", "standing", "ahead", "expected"),
    [
        (replace(WAITING, waiting=False), IDLE, 3, ""),
        (WAITING, IDLE, 0, "a worker"),
        (WAITING, replace(IDLE, starting=2), 7, "a worker that starts (2); 7 before it"),
        (WAITING, replace(IDLE, reason="no capacity"), None, "a worker: no capacity"),
        (
            WAITING,
            replace(IDLE, ready=2, slots=8, reason="quota"),
            1,
            "a free slot: all 8 of 2 workers are busy: quota; 1 before it",
        ),
        (
            WAITING,
            replace(IDLE, ready=1, slots=4, starting=1),
            0,
            "a free slot: all 4 of 1 workers are busy; 1 more start",
        ),
        (WAITING, replace(IDLE, ready=1, slots=4, free=1), 0, "its turn"),
        (replace(WAITING, due_at=NOW + timedelta(hours=1)), IDLE, 0, "its time, 2026-11-16T08:00:00+00:00"),
        (
            replace(WAITING, due_at=NOW + timedelta(hours=1), attempt=2),
            IDLE,
            0,
            "its next attempt, at 2026-11-16T08:00:00+00:00",
        ),
    ],
)
def test_the_reason_is_said(it: Invocation, standing: Standing, ahead: int | None, expected: str) -> None:
    assert waiting_for(it, {"f": standing}, ahead=ahead) == expected


@pytest.mark.parametrize(
    ("kept", "kind", "encoding", "raw"),
    [
        (b'"a"', "application/json", "", b'"a"'),
        (b'"a"', "application/problem+json; charset=utf-8", "", b'"a"'),
        (b'"a"', "text/plain", "", b"a"),
        (b'"AAE="', "image/png", "base64", b"\0\1"),
        (b'"!"', "image/png", "base64", b'"!"'),
        (b"{}", "text/plain", "", b"{}"),
        (b"rubbish", "text/plain", "", b"rubbish"),
    ],
)
def test_a_body_comes_out_as_it_went_in(kept: bytes, kind: str, encoding: str, raw: bytes) -> None:
    assert raw_body(kept, content_type=kind, encoding=encoding) == raw


@pytest.mark.parametrize(("timeout_s", "waits_s"), [(None, 30), (0, 30), (2, 3)])
def test_a_caller_waits_long_enough_to_be_told_that_it_took_too_long(timeout_s: float | None, waits_s: float) -> None:
    assert Limits(sync_wait_s=30).patience_s(timeout_s) == waits_s


@pytest.mark.parametrize(
    ("has", "says"),
    [
        ({}, ""),
        ({"queued": 1, "slots_free": 1}, ""),
        ({"queued": 1}, "no capacity"),
        ({"current_version": 2}, "no capacity"),
        ({"definition": FunctionPut(sku="g1.1", workers_min=1)}, "no capacity"),
    ],
)
def test_a_function_says_why_workers_are_missing_where_some_are(has: dict[str, Any], says: str) -> None:
    row: dict[str, Any] = dict.fromkeys(Deployed.__dataclass_fields__)
    row |= dict.fromkeys(("workers_ready", "workers_starting", "slots_free", "queued", "running"), 0)
    row |= {"current_version": 1, "serving_version": 1, "definition": FunctionPut(sku="g1.1")}
    assert Deployed(**row | {"wait_reason": "no capacity"} | has).waiting_for == says

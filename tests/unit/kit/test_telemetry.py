"""Logs never show a secret and carry the ids of the current work."""

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kit.telemetry import correlated, correlation_id, redact


def test_secrets_are_removed_by_name_and_by_shape() -> None:
    event = {
        "event": "called with psk_abcdefghijklmnop and more",
        "authorization": "Bearer x",
        "api_key": "anything",
        "url": "postgresql://user:hunter2@host/db",
        "port": 80,
    }
    cleaned = redact(None, "", event)
    assert "psk_" not in cleaned["event"]
    assert cleaned["authorization"] == cleaned["api_key"] == "[redacted]"
    assert "hunter2" not in cleaned["url"]
    assert cleaned["port"] == 80


def test_a_correlation_id_holds_within_its_context_only() -> None:
    with correlated("cor_outer"):
        with correlated("cor_inner"):
            assert correlation_id() == "cor_inner"
        assert correlation_id() == "cor_outer"


_LOGS_MUCH = """
import asyncio, sys
from prometheus_client import REGISTRY
from penstock.kit import process
from penstock.kit.telemetry import logger

async def body(stack):
    for number in range(100):
        logger("test").warning("said", number=number)
    dropped = REGISTRY.get_sample_value("penstock_log_lines_dropped_total")
    open(sys.argv[1], "w").write(str(dropped))

process.main("test", body)
"""


@pytest.mark.parametrize("stderr", ["/dev/full", "closed", "reader gone"])
def test_a_log_that_cannot_be_written_ends_nothing(stderr: str, tmp_path: Path) -> None:
    redirect = {"/dev/full": "2>/dev/full >/dev/full", "closed": "2>&- >&-", "reader gone": "2>&1 | true"}[stderr]
    said = tmp_path / "said"
    script = f'"$0" -c "$1" "$2" {redirect}' + ("" if "|" not in redirect else "; exit ${PIPESTATUS[0]}")
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, _LOGS_MUCH, str(said)], stdin=subprocess.DEVNULL, check=False, timeout=60
    )
    assert done.returncode == 0
    assert float(said.read_text()) > 0 or stderr == "reader gone"

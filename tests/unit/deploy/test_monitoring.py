"""The files for Prometheus and Grafana: what they ask for exists, and each alert has its page."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from prometheus_client import REGISTRY

from penstock.processes.commands import ProcessName

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
_NAME = re.compile(r"\b(?:penstock|provisioning)_[a-z0-9_]+")
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
#: `serve node` watches the agent and the sidecar, which have metrics of their own.
PROCESSES = [name.value for name in ProcessName if name is not ProcessName.NODE]


def _alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _dashboard() -> list[dict[str, Any]]:
    return json.loads((ROOT / "deploy" / "grafana" / "penstock.json").read_text())["panels"]


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """All names that processes export."""
    for name in PROCESSES:
        importlib.import_module(f"penstock.processes.{name}")
    return {f"{metric.name}{suffix}" for metric in REGISTRY.collect() for suffix in _SUFFIXES.get(metric.type, ())}


def test_alerts_ask_for_metrics_that_exist(exported: set[str]) -> None:
    assert len(_alerts()) >= 10
    for rule in _alerts():
        names = set(_NAME.findall(rule["expr"]))
        assert names or rule["expr"].startswith("up{"), rule
        assert names <= exported, rule


def test_panels_ask_for_metrics_that_exist(exported: set[str]) -> None:
    for panel in _dashboard():
        for target in panel["targets"]:
            assert set(_NAME.findall(target["expr"])) <= exported, panel["title"]


def test_each_alert_names_a_page_that_exists() -> None:
    for rule in _alerts():
        page = ROOT / rule["annotations"]["runbook"]
        assert page.is_file(), rule
        assert page.parent == ROOT / "docs" / "runbooks"
        assert rule["labels"]["severity"] in {"warning", "critical"}


def test_every_process_is_scraped_where_it_answers() -> None:
    scraped = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    static = next(job for job in scraped if job["job_name"] == "penstock")["static_configs"]
    found = {each["labels"]["process"]: each["targets"] for each in static}
    assert found == {name: [f"127.0.0.1:{_port(name)}"] for name in PROCESSES}


def _port(name: str) -> int:
    settings = importlib.import_module(f"penstock.processes.{name}").Settings
    return next(field.default for field in msgspec.structs.fields(settings) if field.name == "ops_port")

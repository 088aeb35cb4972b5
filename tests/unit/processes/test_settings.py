"""Processes that must agree share the setting."""

from penstock.kit import settings
from penstock.processes import gateway, worker

NEEDED = dict.fromkeys(("PENSTOCK_DATABASE_URL", "PENSTOCK_NATS_URL", "PENSTOCK_PKI_DIR"), "x")


def test_gateway_and_worker_count_heartbeats_by_the_same_setting() -> None:
    environ = {**NEEDED, "PENSTOCK_TEMPORAL_ADDRESS": "x"}
    told = settings.load(gateway.Settings, "gateway", environ).heartbeat_s
    assert settings.load(worker.Settings, "worker", environ).heartbeat_s == told
    environ["PENSTOCK_HEARTBEAT_S"] = "7"
    assert settings.load(gateway.Settings, "gateway", environ).heartbeat_s == 7
    assert settings.load(worker.Settings, "worker", environ).heartbeat_s == 7

"""Processes that must agree share the setting."""

from penstock.kit import settings
from penstock.processes import gateway, worker

NEEDED = {f"PENSTOCK_{name}": "x" for name in ("DATABASE_URL", "NATS_URL", "PKI_DIR", "SECRETS_DIR", "OBJECTS_URL")}


def test_gateway_and_worker_count_heartbeats_by_the_same_setting() -> None:
    environ = {**NEEDED, "PENSTOCK_TEMPORAL_ADDRESS": "x"}
    told = settings.load(gateway.Settings, "gateway", environ).heartbeat_s
    assert settings.load(worker.Settings, "worker", environ).heartbeat_s == told
    environ["PENSTOCK_HEARTBEAT_S"] = "7"
    assert settings.load(gateway.Settings, "gateway", environ).heartbeat_s == 7
    assert settings.load(worker.Settings, "worker", environ).heartbeat_s == 7

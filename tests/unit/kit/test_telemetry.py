"""Logs never show a secret and carry the ids of the current work."""

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

"""The embedded server's configuration, and what operators are told about their own."""

from pathlib import Path

from penstock.embedded import nats

_GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "operate.md"


def test_the_guide_exports_and_imports_what_the_embedded_server_does() -> None:
    guide = _GUIDE.read_text(encoding="utf-8")
    for name, answers in nats._SERVICES:
        kind = ", response_type: stream" if answers == "stream" else ""
        assert f'{{ service: "{name}"{kind}, accounts: [SIDECARS] }}' in guide
    for name in nats._STREAMS:
        assert f'{{ stream: "{name}", accounts: [SIDECARS] }}' in guide
    for line in nats._imports():
        assert line in guide

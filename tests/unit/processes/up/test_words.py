"""What `penstock up` says."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from penstock.processes.up import banner
from penstock.processes.up.banner import Ready
from penstock.processes.up.display import Display
from penstock.processes.up.folder import Instance, Trial


def _ready(simulated_gpus: int, temporal_ui: str = "http://127.0.0.1:4") -> Ready:
    instance = Instance(
        api="http://127.0.0.1:1",
        gateway="http://127.0.0.1:2",
        key="psk_k",
        pid=3,
        temporal_ui=temporal_ui,
        nats="wss://n" if temporal_ui else "",
    )
    return Ready(instance=instance, simulated_gpus=simulated_gpus, notes=[], trial=Trial(sku="g1.1"))


def test_the_banner_names_every_place_the_key_and_three_commands() -> None:
    text = banner.text(_ready(64), Path("/data"), usual_folder=True, attached=True)
    for words in ("http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:4", "wss://n", "psk_k", "/data"):
        assert words in text
    for words in (
        "alloc create --sku g1.1 --name demo --wait",
        "alloc exec demo -- ",
        "alloc release demo --wait",
        "Ctrl-C",
    ):
        assert words in text
    assert "64 GPUs of this node are SIMULATED" in text
    assert "PENSTOCK_DATA" not in text


def test_the_banner_does_not_speak_of_what_is_not_there() -> None:
    text = banner.text(_ready(0, temporal_ui=""), Path("/data"), usual_folder=False, attached=False)
    assert "SIMULATED" not in text
    assert "Temporal" not in text
    assert "NATS" not in text
    assert "export PENSTOCK_DATA=/data" in text
    assert "down stops everything" in text


async def test_steps_are_plain_lines_without_a_terminal() -> None:
    output = io.StringIO()
    display = Display(Console(file=output))
    async with display.live():
        async with display.step("postgres"):
            pass
        with pytest.raises(RuntimeError):
            async with display.step("nats"):
                raise RuntimeError
    assert output.getvalue() == "postgres: ready after 0.0 s\n"


async def test_a_terminal_that_went_away_ends_nothing() -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    Display(Console(file=Gone())).say("nobody listens")

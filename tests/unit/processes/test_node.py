"""What `penstock node join` runs on a host, and what it tells the sidecar there."""

from pathlib import Path

import pynvml
import pytest

from penstock.embedded import child
from penstock.embedded.child import Child
from penstock.kit import settings
from penstock.kit.errors import Invalid
from penstock.node import identity
from penstock.node.inventory import open_inventory
from penstock.processes import agent, node, sidecar
from penstock.processes.up.folder import DataFolder


class Who:
    """A node that was told these addresses."""

    gateway_url = "http://10.0.0.1:8081"

    def __init__(self, nats_url: str, folder: Path) -> None:
        self.nats_url = nats_url
        self.authority = folder / "ca.pem"


async def _programs(
    nats_url: str, environ: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, dict[str, str]]]:
    """Names and environments, in the order of their start."""
    found: list[tuple[str, dict[str, str]]] = []

    async def enrolled(*_: object) -> Who:
        return Who(nats_url, folder)

    async def start(name: str, *_: object, env: dict[str, str], **__: object) -> Child:
        found.append((name, env))
        raise NotImplementedError

    monkeypatch.setattr(node, "_enrolled", enrolled)
    monkeypatch.setattr(child, "start", start)
    given = {"PENSTOCK_AGENT_DATA_DIR": str(folder), "PENSTOCK_AGENT_ENROLMENT_TOKEN": "hidden", **environ}
    loaded = settings.load(agent.Settings, "agent", given)
    for program in await node.plan(DataFolder(folder), loaded, given):
        with pytest.raises(NotImplementedError):
            await program.start({})
    return found


async def test_a_node_that_was_told_of_nats_runs_a_sidecar_that_trusts_its_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, own), (second, at_agent) = await _programs("wss://10.0.0.1:8444", {}, tmp_path, monkeypatch)
    assert (first, second) == ("sidecar", "agent")
    assert own["PENSTOCK_SIDECAR_NATS_URL"] == "wss://10.0.0.1:8444"
    assert own["PENSTOCK_SIDECAR_NATS_CA_FILE"] == str(tmp_path / "ca.pem")
    assert own["PENSTOCK_SIDECAR_GATEWAY_URL"] == "http://10.0.0.1:8081"
    assert own["PENSTOCK_SIDECAR_SOCKET"] == at_agent["PENSTOCK_AGENT_SIDECAR_SOCKET"]
    assert own["PENSTOCK_SIDECAR_UID"] == at_agent["PENSTOCK_AGENT_SIDECAR_UID"]
    assert "hidden" not in str(own), "the token is the agent's"


async def test_what_the_host_says_itself_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"PENSTOCK_SIDECAR_NATS_URL": "tls://nats.example:4222"}
    (_, own), _ = await _programs("wss://10.0.0.1:8444", environ, tmp_path, monkeypatch)
    assert own["PENSTOCK_SIDECAR_NATS_URL"] == "tls://nats.example:4222"
    assert "PENSTOCK_SIDECAR_NATS_CA_FILE" not in own, "another server has another authority"


async def test_the_file_of_settings_counts_as_the_hosts_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(
        'nats_url = "nats://us:secret@n:1"\n[sidecar]\nnats_url = "nats://here:4222"\ngateway_url = "http://here"\n'
    )
    for told in ("", "wss://10.0.0.1:8444"):
        (_, own), _ = await _programs(told, {"PENSTOCK_CONFIG": str(file)}, tmp_path, monkeypatch)
        loaded = settings.load(sidecar.Settings, "sidecar", own)
        assert (loaded.nats_url, loaded.gateway_url, loaded.nats_ca_file) == ("nats://here:4222", "http://here", "")


@pytest.mark.parametrize(
    ("nats_url", "environ"), [("", {}), ("wss://10.0.0.1:8444", {"PENSTOCK_AGENT_SIDECAR_SOCKET": "/run/s.sock"})]
)
async def test_without_nats_or_with_a_sidecar_of_its_own_the_host_runs_an_agent_alone(
    nats_url: str, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [(name, _)] = await _programs(nats_url, environ, tmp_path, monkeypatch)
    assert name == "agent"


@pytest.mark.parametrize(
    ("url", "file", "field"),
    [("nats://n:1", "ca.pem", "sidecar.nats_url"), ("wss://n:1", "missing.pem", "sidecar.nats_ca_file")],
)
def test_an_authority_that_cannot_serve_is_refused(url: str, file: str, field: str, tmp_path: Path) -> None:
    given = sidecar.Settings(nats_url=url, gateway_url="", socket="", nats_ca_file=str(tmp_path / file))
    with pytest.raises(Invalid) as refused:
        sidecar.trust(given)
    assert refused.value.field == field


async def test_a_host_without_a_driver_does_not_become_a_node_unless_it_is_to_simulate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    async def enrolled(*_: object, **__: object) -> object:
        nonlocal tried
        tried += 1
        raise TimeoutError

    tried = 0
    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    monkeypatch.setattr(identity, "enrol", enrolled)
    given = {"PENSTOCK_AGENT_DATA_DIR": str(tmp_path), "PENSTOCK_AGENT_ENROLMENT_TOKEN": "t"}
    with pytest.raises(Invalid, match="node join --simulated") as refused:
        await agent.identify(settings.load(agent.Settings, "agent", given), tmp_path)
    assert (refused.value.field, tried) == ("agent.simulated_gpus", 0)
    with pytest.raises(Invalid, match="--simulated"):
        open_inventory("nod_a", 0, production=False)
    simulating = given | {"PENSTOCK_AGENT_SIMULATED_GPUS": "64"}
    with pytest.raises(Invalid, match="to enrol"):
        await agent.identify(settings.load(agent.Settings, "agent", simulating), tmp_path)
    assert tried == 1

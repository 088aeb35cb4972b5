"""What the programs of an install are told, and what is kept from those that stand near tenants."""

import os
from pathlib import Path

import pytest

from penstock.embedded import child
from penstock.embedded.child import Child
from penstock.processes.up import programs
from penstock.processes.up.folder import DataFolder, Ports
from penstock.processes.up.programs import Addresses
from penstock.processes.up.supervisor import Program

_ADDRESSES = Addresses(
    database_url="postgresql://penstock:hidden@127.0.0.1:5/postgres",
    nats_url="nats://penstock:hidden@127.0.0.1:4222",
    temporal_address="127.0.0.1:7233",
    ports=Ports(api=1, gateway=2, link=3),
)
_ENVIRON = {
    "PATH": "/bin",
    "PENSTOCK_NATS_URL": "nats://u:hidden@n:1",
    "PENSTOCK_STRIPE_API_KEY": "hidden",
    "PENSTOCK_WORKER_DATABASE_URL": "postgresql://u:hidden@d",
    "PENSTOCK_API_KEY": "hidden",
}


class Started(Exception):
    """Instead of a process."""


async def _environment(program: Program, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found: dict[str, str] = {}

    async def start(*_: object, env: dict[str, str], **__: object) -> Child:
        found.update(env)
        raise Started

    monkeypatch.setattr(child, "start", start)
    with pytest.raises(Started):
        await program.start({})
    return found


async def test_neither_agent_nor_sidecar_learns_how_we_get_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = DataFolder(tmp_path)
    own = {**_ENVIRON, "PENSTOCK_AGENT_ENROLMENT_TOKEN": "hidden"}
    sidecar = await _environment(programs.sidecar(folder, _ADDRESSES, own), monkeypatch)
    agent = await _environment(
        programs.agent(folder, _ADDRESSES, _ENVIRON, enrolment="t", tenant=tmp_path), monkeypatch
    )
    for env in (sidecar, agent):
        assert "hidden" not in str(env)
        assert not {name for name in env if name.endswith(("DATABASE_URL", "ISSUER_SEED_FILE", "PKI_DIR"))}
    assert not [name for name in sidecar if name.startswith("PENSTOCK_AGENT_")]
    assert sidecar["PENSTOCK_SIDECAR_NATS_URL"] == "nats://127.0.0.1:4222"
    assert "NATS" not in str([name for name in agent if "SIDECAR" not in name])
    assert (
        sidecar["PENSTOCK_SIDECAR_SOCKET"] == agent["PENSTOCK_AGENT_SIDECAR_SOCKET"] == str(tmp_path / "sidecar.sock")
    )
    assert sidecar["PENSTOCK_SIDECAR_UID"] == agent["PENSTOCK_AGENT_SIDECAR_UID"]
    assert sidecar["PENSTOCK_SIDECAR_UID"] == ("204097" if os.geteuid() == 0 else "0")


async def test_the_sidecars_user_follows_the_units_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    environ = {"PENSTOCK_AGENT_UID_FIRST": "300000", "PENSTOCK_AGENT_UID_COUNT": "10"}
    env = await _environment(programs.sidecar(DataFolder(tmp_path), _ADDRESSES, environ), monkeypatch)
    assert env["PENSTOCK_SIDECAR_UID"] == "300011"
    environ["PENSTOCK_AGENT_SIDECAR_UID"] = "77"
    env = await _environment(programs.sidecar(DataFolder(tmp_path), _ADDRESSES, environ), monkeypatch)
    assert env["PENSTOCK_SIDECAR_UID"] == "77"


def test_nodes_are_told_of_the_embedded_nats_where_they_can_reach_it() -> None:
    open_to_others = Ports(host="10.0.0.1", api=1, gateway=2, link=3, nats=4)
    assert programs.nodes_nats_url(open_to_others, {}) == "wss://10.0.0.1:4"
    assert programs.nodes_nats_url(_ADDRESSES.ports, {}) == ""
    assert programs.nodes_nats_url(open_to_others, {"PENSTOCK_NATS_URL": "nats://u:p@n:1"}) == ""
    own = {"PENSTOCK_NATS_URL": "nats://u:p@n:1", "PENSTOCK_NODES_NATS_URL": "tls://n:1"}
    assert programs.nodes_nats_url(_ADDRESSES.ports, own) == "tls://n:1"


async def test_the_issuers_key_is_the_embedded_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = DataFolder(tmp_path)
    own = await _environment(programs.control("activator", folder, _ADDRESSES, {}), monkeypatch)
    assert own["PENSTOCK_ACTIVATOR_NATS_ISSUER_SEED_FILE"] == str(tmp_path / "nats.issuer")
    theirs = await _environment(programs.control("activator", folder, _ADDRESSES, _ENVIRON), monkeypatch)
    assert "PENSTOCK_ACTIVATOR_NATS_ISSUER_SEED_FILE" not in theirs


async def test_the_local_node_simulates_unless_somebody_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text("[agent]\nsimulated_gpus = 3\n")
    for given, expected in (
        ({}, "64"),
        ({programs.SIMULATED_GPUS: "2"}, "2"),
        ({"PENSTOCK_CONFIG": str(file)}, None),
    ):
        program = programs.agent(
            DataFolder(tmp_path), _ADDRESSES, {**_ENVIRON, **given}, enrolment="t", tenant=tmp_path
        )
        assert (await _environment(program, monkeypatch)).get(programs.SIMULATED_GPUS) == expected

"""What a unit may be asked for, and how endings are told apart."""

import pytest

from penstock.node.control import Ending
from penstock.node.errors import NoUnit, Refused
from penstock.node.journal import UnitRecord
from penstock.node.unit import Unit, check_env, check_handoff, check_secrets, check_start, check_tenant, check_unit_id
from penstock.wire.link import UnitState
from penstock.wire.tasks import Limits, SecretRef, UnitHandoff, UnitStart


@pytest.mark.parametrize("name", ["LD_PRELOAD", "LD_LIBRARY_PATH", "NVIDIA_X", "CUDA_VISIBLE_DEVICES", "PENSTOCK_X"])
def test_reserved_variables_are_refused(name: str) -> None:
    with pytest.raises(Refused) as refused:
        check_env({name: "x"})
    assert refused.value.code == "reserved_env"
    assert name in refused.value.detail


@pytest.mark.parametrize("name", ["", "A=B", "1A", "A B", "A\0", "\u00c4"])
def test_odd_names_of_variables_are_refused(name: str) -> None:
    with pytest.raises(Refused) as refused:
        check_env({name: "x"})
    assert refused.value.code == "malformed"


@pytest.mark.parametrize("unit_id", ["", ".", "..", "../x", "a/b", "/abs", "-x", "A", "x" * 65, "x\n", "x\0"])
def test_names_that_are_no_folders_are_refused(unit_id: str) -> None:
    with pytest.raises(Refused):
        check_unit_id(unit_id)


@pytest.mark.parametrize(
    ("ending", "ooms", "expected"),
    [
        (Ending(0, signalled=False), 0, "exited"),
        (Ending(1, signalled=False), 1, "exited"),
        (Ending(137, signalled=True), 0, "killed"),
        (Ending(137, signalled=False), 0, "killed"),
        (Ending(137, signalled=True), 1, "oom"),
        (Ending(143, signalled=True), 1, "killed"),
    ],
)
def test_endings(ending: Ending, ooms: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Unit(UnitRecord(unit_id="alc_x", state=UnitState.RUNNING, boot_id="b"))
    monkeypatch.setattr(unit, "ooms", lambda: ooms)
    assert unit.classify(ending).exit_class == expected


def test_an_absent_unit_says_so_in_a_sentence() -> None:
    error = NoUnit("alc_x")
    assert isinstance(error, KeyError)
    assert str(error) == "no unit alc_x runs on this node"


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "/etc/x", "a\0b", "x" * 129])
def test_secrets_that_are_no_files_are_refused(name: str) -> None:
    with pytest.raises(Refused) as refused:
        check_secrets([SecretRef(name=name, version=1)])
    assert refused.value.code == "malformed"


def test_a_secret_is_no_way_to_a_reserved_variable() -> None:
    with pytest.raises(Refused) as refused:
        check_secrets([SecretRef(name="key", version=1, env="LD_PRELOAD")])
    assert refused.value.code == "reserved_env"
    with pytest.raises(Refused):
        check_secrets([SecretRef(name=f"s{number}", version=1) for number in range(65)])
    check_secrets([SecretRef(name="api-key.v1", version=1, env="API_KEY"), SecretRef(name="other", version=2)])


def test_stock_has_no_command_and_no_secrets() -> None:
    limits = Limits(memory_bytes=1, processes_max=1, cpus=1, scratch_bytes=1)
    common = {"unit_id": "alc_x", "image": "python:3", "gpu_uuids": [], "limits": limits, "stock": True}
    check_start(UnitStart(**common))
    for more in ({"command": ["true"]}, {"secrets": [SecretRef(name="a", version=1)]}, {"allocation_id": "a b"}):
        with pytest.raises(Refused):
            check_start(UnitStart(**common, **more))


@pytest.mark.parametrize(
    "change", [{"allocation_id": ""}, {"allocation_id": "A\nB"}, {"unit_id": "../x"}, {"env": {"PENSTOCK_UNIT": "x"}}]
)
def test_a_handoff_that_could_lead_elsewhere_is_refused(change: dict[str, object]) -> None:
    good: dict[str, object] = {"unit_id": "alc_x", "allocation_id": "alc_y"}
    check_handoff(UnitHandoff(**good))
    with pytest.raises(Refused):
        check_handoff(UnitHandoff(**good | change))


def test_only_the_tenant_of_a_stock_unit_is_listened_to() -> None:
    record = UnitRecord(unit_id="alc_x", state=UnitState.RUNNING, boot_id="b", stock=True)
    check_tenant(record, "alc_anyone")
    handed = UnitRecord(unit_id="alc_x", state=UnitState.RUNNING, boot_id="b", stock=True, allocation_id="alc_a")
    check_tenant(handed, "alc_a")
    with pytest.raises(Refused) as refused:
        check_tenant(handed, "alc_b")
    assert refused.value.code == "taken"

"""What a unit may be asked for, and how endings are told apart."""

import pytest

from penstock.node.control import Ending, configuration
from penstock.node.errors import NoUnit, Refused
from penstock.node.journal import UnitRecord
from penstock.node.unit import Unit, check_env, check_unit_id
from penstock.wire.link import UnitState


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


def test_a_configuration_cannot_be_split_by_its_content() -> None:
    limits = {"processes": 1, "files": 2, "file_bytes": 3, "address_space": 4}
    made = configuration(isolated=True, limits=limits, command=["a", ""], env={"K": "v=w"})
    assert made == b"%08d" % (len(made) - 8) + b"1\x001\x002\x003\x004\x002\x00a\x00\x00K=v=w"
    with pytest.raises(Refused):
        configuration(isolated=True, limits=limits, command=["a\0b"], env={})
    with pytest.raises(Refused):
        configuration(isolated=True, limits=limits, command=["a"], env={"K": "x" * (2 << 20)})


def test_an_absent_unit_says_so_in_a_sentence() -> None:
    error = NoUnit("alc_x")
    assert isinstance(error, KeyError)
    assert str(error) == "no unit alc_x runs on this node"

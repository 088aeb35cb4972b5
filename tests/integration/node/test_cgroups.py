"""Both layouts of control groups, on folders that look like them."""

from pathlib import Path

import pytest

from node_host import LIMITS
from penstock.node import cgroups


def test_version_2_moves_the_agent_into_a_leaf_and_hands_controllers_down(tmp_path: Path) -> None:
    own = tmp_path / "mount" / "system.slice" / "penstock.service"
    own.mkdir(parents=True)
    (tmp_path / "mount" / "cgroup.controllers").write_text("cpu memory pids")
    (own / "cgroup.controllers").write_text("cpu io memory pids")
    (own / "cgroup.subtree_control").write_text("")
    (own / "cgroup.procs").write_text("17\n")
    membership = tmp_path / "self"
    membership.write_text("0::/system.slice/penstock.service\n")
    groups = cgroups.find(tmp_path / "mount", str(membership))
    assert (groups.version, groups.limits) == (2, {"cpu", "memory", "pids"})
    assert (own / "penstock-agent" / "cgroup.procs").read_text() == "17"
    assert (own / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    folders = groups.make("alc_x", LIMITS)
    assert folders == [own / "penstock-alc_x"]
    assert (folders[0] / "memory.max").read_text() == str(LIMITS.memory_bytes)
    assert (folders[0] / "pids.max").read_text() == str(LIMITS.processes_max)
    assert (folders[0] / "cpu.max").read_text() == "200000 100000"


def test_version_1_has_a_folder_per_controller(tmp_path: Path) -> None:
    for name in ("memory/own", "cpu,cpuacct", "pids"):
        (tmp_path / "mount" / name).mkdir(parents=True)
    membership = tmp_path / "self"
    membership.write_text("4:memory:/own\n3:cpu,cpuacct:/\n2:pids:/\n1:name=systemd:/\n0::/\n")
    groups = cgroups.find(tmp_path / "mount", str(membership))
    assert (groups.version, groups.limits) == (1, {"cpu", "memory", "pids"})
    folders = groups.make("alc_x", LIMITS)
    assert {folder.parent.name for folder in folders} == {"own", "cpu,cpuacct", "pids"}


def test_without_groups_nothing_is_claimed(tmp_path: Path) -> None:
    assert cgroups.find(tmp_path, str(tmp_path / "absent")).limits == frozenset()


@pytest.mark.parametrize(
    ("name", "text"), [("memory.events", "low 0\noom 2\noom_kill 1\n"), ("memory.oom_control", "oom_kill 1\n")]
)
def test_kills_for_want_of_memory_are_counted(tmp_path: Path, name: str, text: str) -> None:
    assert cgroups.oom_kills([tmp_path]) == 0
    (tmp_path / name).write_text(text)
    assert cgroups.oom_kills([tmp_path]) == 1

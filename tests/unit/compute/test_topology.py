"""Which of a node's free slots an allocation gets."""

from collections.abc import Sequence

import pytest

from penstock.compute.topology import Seat, choose
from penstock.wire.tasks import GpuKind


def seat(name: str, *, numa: int = 0, nvlink: str = "", kind: str = "gpu", gpu: str = "") -> Seat:
    return Seat(
        slot_id=name,
        node_id="nod",
        gpu_uuid=name,
        gpu_index=0,
        simulated=True,
        kind=kind,
        whole_uuid=gpu or name,
        rack_id=1,
        numa_node=numa,
        nvlink_domain=nvlink,
    )


def names(found: Sequence[Seat]) -> str:
    return "".join(sorted(each.slot_id for each in found))


def test_one_nvlink_domain_comes_before_one_numa_node() -> None:
    free = [seat("a", numa=0), seat("b", numa=0), seat("c", numa=0, nvlink="x"), seat("d", numa=1, nvlink="x")]
    assert names(choose(free, 2)) == "cd"


def test_one_numa_node_within_a_domain_is_better_still() -> None:
    free = [seat(name, numa=index // 2, nvlink="x") for index, name in enumerate("abcd")] + [seat("e", numa=0)]
    assert names(choose(free, 2)) in ("ab", "cd")


def test_without_nvlink_one_numa_node_is_taken() -> None:
    free = [seat("a", numa=0), seat("b", numa=1), seat("c", numa=0), seat("d", numa=1), seat("e", numa=1)]
    assert names(choose(free, 2)) == "ac"
    assert names(choose(free, 3)) == "bde"


def test_a_single_gpu_leaves_domains_whole() -> None:
    free = [seat(name, nvlink="x") for name in "abcd"] + [seat("e")]
    assert names(choose(free, 1)) == "e"


def test_the_tightest_domain_is_taken() -> None:
    free = [seat(name, nvlink="x") for name in "abcd"] + [seat(name, nvlink="y") for name in "ef"]
    assert names(choose(free, 2)) == "ef"


def test_where_nothing_holds_them_all_the_largest_group_goes_first() -> None:
    free = [seat(name, nvlink="x") for name in "abc"] + [seat("d", numa=1), seat("e", numa=2)]
    assert set("abc") <= set(names(choose(free, 4)))


def test_fewer_than_asked_for_are_all_that_there_are() -> None:
    assert len(choose([seat("a")], 2)) == 1
    assert choose([], 1) == []


@pytest.mark.parametrize("kind", [GpuKind.MIG, GpuKind.MPS])
def test_shares_go_onto_the_fullest_gpu_that_still_fits(kind: GpuKind) -> None:
    free = [seat(name, kind=kind, gpu="g1") for name in "abcd"] + [seat(name, kind=kind, gpu="g2") for name in "ef"]
    assert names(choose(free, 1)) in ("e", "f")
    assert names(choose(free, 2)) == "ef"
    assert set(names(choose(free, 3))) < set("abcd")


def test_mig_shares_that_no_gpu_holds_take_as_few_gpus_as_possible() -> None:
    free = [seat(name, kind="mig", gpu=gpu) for name, gpu in zip("abcdef", ("1", "2", "2", "3", "3", "3"), strict=True)]
    assert {each.whole_uuid for each in choose(free, 5)} == {"2", "3"}


def test_mps_shares_of_a_unit_are_never_on_two_gpus() -> None:
    free = [seat(name, kind="mps", gpu=gpu) for name, gpu in zip("abcd", ("1", "1", "2", "2"), strict=True)]
    assert len(choose(free, 3)) == 2

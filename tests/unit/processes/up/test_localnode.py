"""The local node of an install."""

import msgspec

from penstock.processes.up import localnode
from penstock.wire.rest import Node
from unit.cli.cases import GPU, NODE


def test_shares_of_a_gpu_are_one_gpu() -> None:
    shares = [{**GPU, "index": index, "uuid": f"{index}/mps-{share}"} for index in (0, 1) for share in range(4)]
    node = msgspec.convert({**NODE, "gpus": shares}, Node)
    assert localnode.simulated_gpus(node) == 2
    assert localnode.simulated_gpus(msgspec.structs.replace(node, simulated=False)) == 0

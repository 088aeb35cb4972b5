"""The SKU that a person can try on the local node, and the command that defines one where there is none."""

import shlex
from collections.abc import Sequence
from typing import Final

from penstock.processes.up.folder import Trial
from penstock.wire.rest import NodeGpu, Sku

_NAME: Final = "share"
#: The price is the same as that of whole GPUs, so that nothing looks cheaper than it is.
_OFFER: Final = ("--gpu-model", "*", "--price", "3.49", "--memory", "2", "--cpus", "1")


def choose(skus: Sequence[Sku], gpus: Sequence[NodeGpu]) -> Trial:
    """A SKU of one of these GPUs, preferably one with room; else one to define."""
    fitting = [sku for sku in skus if any(_fits(sku, gpu) for gpu in gpus)]
    if fitting:
        return Trial(sku=max(fitting, key=lambda sku: sku.gpus_free).name)
    first = gpus[0]
    share = {"mig": ("--mig", first.profile), "mps": ("--mps", "0")}.get(first.kind, ())
    taken = {sku.name for sku in skus}
    name = next(name for at in range(len(taken) + 1) if (name := f"{_NAME}{at or ''}") not in taken)
    return Trial(sku=name, define=shlex.join(["sku", "set", name, *_OFFER, *share]))


def _fits(sku: Sku, gpu: NodeGpu) -> bool:
    """Whether one place of the SKU can be this slot."""
    if not sku.enabled or 1 not in sku.gpu_counts or sku.share != gpu.kind:
        return False
    return (
        sku.gpu_model in ("*", gpu.model)
        and sku.mig_profile == gpu.profile
        and sku.share_memory_bytes_min <= gpu.memory_bytes
    )

"""How each GPU of a node is given out: as it is, whole, split by MIG, or shared by MPS. Pure.

An operator writes it as `whole`, `mig:PROFILE[,PROFILE…]` or `mps:N`, for a GPU's index or for all (`*`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.kit.errors import Invalid
from penstock.wire.tasks import Gpu, GpuKind

FIELD: Final = "agent.gpu_layout"
#: A GPU serves so many clients by MPS at most.
MPS_SHARES_MAX: Final = 48
#: A GPU has so many compute slices for MIG at most.
MIG_SLICES_MAX: Final = 7
_INDEX_MAX: Final = 1024
_PROFILE: Final = re.compile(r"(?P<slices>[1-7])g\.(?P<gigabytes>[0-9]{1,4})gb([+-][a-z0-9.+-]{1,15})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One GPU's. `profiles` are those of MIG, the largest first; `shares` is the number of them by MPS."""

    kind: GpuKind
    profiles: tuple[str, ...] = ()
    shares: int = 0

    def __str__(self) -> str:
        """As it is written."""
        if self.kind is GpuKind.MIG:
            return f"mig:{','.join(self.profiles)}"
        return f"mps:{self.shares}" if self.kind is GpuKind.MPS else "whole"


@dataclass(frozen=True, slots=True)
class Layouts:
    """A node's. A GPU that none is given for stays as it is found."""

    by_index: Mapping[int, Layout]
    rest: Layout | None = None

    def of(self, index: int) -> Layout | None:
        """The one for a GPU."""
        return self.by_index.get(index, self.rest)

    @property
    def mps(self) -> bool:
        """Whether some GPU may be shared by MPS."""
        given = [*self.by_index.values(), *([self.rest] if self.rest else [])]
        return any(layout.kind is GpuKind.MPS for layout in given)


AS_FOUND: Final = Layouts({})


def parse(setting: Mapping[str, str] | str) -> Layouts:
    """The setting, or Invalid that names what is wrong with it. A bare layout is for all GPUs."""
    entries = {"*": setting} if isinstance(setting, str) else dict(setting)
    rest = entries.pop("*", "")
    by_index: dict[int, Layout] = {}
    for index, text in entries.items():
        if not (index.isascii() and index.isdigit() and int(index) < _INDEX_MAX):
            raise Invalid(f"{FIELD}: {index} is not the index of a GPU, nor *", field=FIELD)
        by_index[int(index)] = _layout(text)
    return Layouts(by_index, _layout(rest) if rest else None)


def _layout(text: str) -> Layout:
    word, _, rest = text.strip().partition(":")
    if word == "whole" and not rest:
        return Layout(kind=GpuKind.WHOLE)
    if word == "mig" and rest:
        return Layout(kind=GpuKind.MIG, profiles=_profiles(rest))
    if word == "mps" and rest.isascii() and rest.isdigit() and 1 <= int(rest) <= MPS_SHARES_MAX:
        return Layout(kind=GpuKind.MPS, shares=int(rest))
    raise Invalid(
        f"{FIELD}: {text[:64]!r} is not a layout: whole, mig:PROFILE[,PROFILE…] such as mig:1g.10gb,2g.20gb,"
        f" or mps:N with N from 1 to {MPS_SHARES_MAX}",
        field=FIELD,
    )


def _profiles(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if not _PROFILE.fullmatch(name):
            raise Invalid(f"{FIELD}: {name[:64]!r} is not a MIG profile such as 1g.10gb", field=FIELD)
    if sum(map(slices, names)) > MIG_SLICES_MAX:
        raise Invalid(f"{FIELD}: {text[:64]} needs more than the {MIG_SLICES_MAX} slices of a GPU", field=FIELD)
    return tuple(sorted(names, key=lambda name: (-slices(name), name)))


def slices(profile: str) -> int:
    """How many compute slices an instance of this profile takes."""
    match = _PROFILE.fullmatch(profile)
    return int(match["slices"]) if match else 0


def gigabytes(profile: str) -> int:
    """How much memory its name promises."""
    match = _PROFILE.fullmatch(profile)
    return int(match["gigabytes"]) if match else 0


def mps_shares(gpu: Gpu, shares: int) -> list[Gpu]:
    """A whole GPU as so many equal shares by MPS."""
    return [
        share(gpu, f"mps-{n}", GpuKind.MPS, memory_bytes=gpu.memory_bytes // shares, threads_percent=100 // shares)
        for n in range(shares)
    ]


def share(
    gpu: Gpu, name: str, kind: GpuKind, *, memory_bytes: int, threads_percent: int = 100, profile: str = ""
) -> Gpu:
    """A part of a GPU, named after it. Links between whole GPUs mean nothing to a part."""
    return Gpu(
        uuid=f"{gpu.uuid}/{name}",
        index=gpu.index,
        model=gpu.model,
        memory_bytes=memory_bytes,
        pci_address=gpu.pci_address,
        numa_node=gpu.numa_node,
        kind=kind,
        parent_uuid=gpu.uuid,
        profile=profile,
        threads_percent=threads_percent,
    )


def whole(uuid: str) -> str:
    """The GPU of an MPS share's uuid; any other uuid stays as it is."""
    return uuid.rpartition("/mps-")[0] or uuid


def variables(gpus: Sequence[Gpu], *, pipe: str) -> dict[str, str]:
    """What CUDA must find in the environment of a unit with these. `pipe` is where the unit sees the service of MPS."""
    visible = ",".join(dict.fromkeys(whole(gpu.uuid) for gpu in gpus))
    found = {"CUDA_VISIBLE_DEVICES": visible, "NVIDIA_VISIBLE_DEVICES": visible}
    shares = [gpu for gpu in gpus if gpu.kind is GpuKind.MPS]
    if shares:
        memory_mb = sum(gpu.memory_bytes for gpu in shares) >> 20
        found["CUDA_MPS_PIPE_DIRECTORY"] = pipe
        found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(min(100, sum(gpu.threads_percent for gpu in shares)))
        found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={memory_mb}M"
    return found

"""Requests that make no sense are refused with the field named."""

from typing import cast

import pytest

from penstock.compute.errors import BadDigest, BadGpuCount, BadImage, ReservedEnv, UnknownSku
from penstock.compute.model import Sku
from penstock.compute.service import catalogue, validate
from penstock.kit.db import Reader
from penstock.kit.errors import Invalid
from penstock.wire.rest import AllocationCreate

OFFER = Sku(
    name="g1.1",
    description="",
    gpu_model="*",
    gpu_counts=(1, 2, 4, 8),
    price_microusd_per_gpu_hour=1,
    memory_bytes_per_gpu=1,
    cpus_per_gpu=1,
    processes_max=1,
    scratch_bytes=1,
    enabled=True,
)


@pytest.mark.parametrize("image", ["python:3", "python:3.12", "lib/py-thon_x:1", f"py@sha256:{'a' * 64}"])
def test_image_names_that_are_well_formed_pass(image: str) -> None:
    validate.image(image)


@pytest.mark.parametrize("image", ["evil@sha256:short", f"x@sha256:{'A' * 64}", "x@md5:abc", "x@"])
def test_image_with_a_bad_digest_is_refused(image: str) -> None:
    with pytest.raises(BadDigest, match="bad digest"):
        validate.image(image)


@pytest.mark.parametrize("image", ["", "../etc", "/abs", "A:1", "a b", "x:", "a\n"])
def test_image_with_a_bad_name_is_refused(image: str) -> None:
    with pytest.raises(BadImage):
        validate.image(image)


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ld_preload", "PENSTOCK_X"]
)
def test_reserved_variables_are_refused(name: str) -> None:
    with pytest.raises(ReservedEnv, match="reserved_env"):
        validate.environment({name: "x"})


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (AllocationCreate(sku="g1.1", env={"1A": ""}), "env"),
        (AllocationCreate(sku="g1.1", env={"A": "x\0"}), "env"),
        (AllocationCreate(sku="g1.1", env={"A": "x" * 40_000}), "env"),
        (AllocationCreate(sku="g1.1", command=["a\0b"]), "command"),
        (AllocationCreate(sku="g1.1", command=[""]), "command"),
        (AllocationCreate(sku="g1.1", ports=[80, 80]), "ports"),
    ],
)
def test_what_a_process_cannot_be_started_with_is_refused(body: AllocationCreate, field: str) -> None:
    with pytest.raises(Invalid) as caught:
        validate.request(body)
    assert caught.value.field == field


@pytest.mark.parametrize("gpus", [0, -1, 3, 16, 9223372036854775808])
def test_a_size_that_the_sku_lacks_is_refused_with_those_it_has(gpus: int) -> None:
    with pytest.raises(BadGpuCount, match=r"1, 2, 4, 8.*max is 8") as caught:
        validate.shape(OFFER, name="g1.1", gpus=gpus)
    assert caught.value.field == "gpus"


async def test_an_unknown_or_closed_sku_is_refused_with_those_that_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_names(_: object, *, limit: int) -> list[str]:
        return ["g1.1", "g1.2"][:limit]

    monkeypatch.setattr(catalogue.catalogue, "open_names", open_names)
    nothing = cast("Reader", None)
    for offer in (None, Sku(**{n: getattr(OFFER, n) for n in Sku.__dataclass_fields__} | {"enabled": False})):
        with pytest.raises(UnknownSku, match=r"there is no SKU g9; there are g1\.1, g1\.2"):
            await catalogue.opened(nothing, offer, name="g9", gpus=1)

"""Identifiers sort by time, carry their kind and refuse anything else."""

import pytest

from penstock.kit.errors import Invalid
from penstock.kit.ids import check_id, is_id, new_id


def test_ids_made_later_sort_later(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1_000_000_000_000_000_000, 1_000_000_001_000_000_000])
    monkeypatch.setattr("penstock.kit.ids.time.time_ns", lambda: next(moments))
    assert new_id("alc") < new_id("alc")


def test_ten_thousand_ids_differ() -> None:
    assert len({new_id("alc") for _ in range(10_000)}) == 10_000


@pytest.mark.parametrize(
    "text", ["", "alc_", "alc_xyz", "prj_" + "0" * 26, "alc_" + "u" * 26, "alc_" + "0" * 27, "alc_" + "0" * 26 + "\n"]
)
def test_malformed_ids_are_refused_naming_the_field(text: str) -> None:
    assert not is_id("alc", text)
    with pytest.raises(Invalid) as caught:
        check_id("alc", text, field="allocation_id")
    assert caught.value.field == "allocation_id"


def test_the_default_object_has_a_readable_id() -> None:
    assert is_id("prj", "prj_default")
    assert is_id("prj", "prj_platform")

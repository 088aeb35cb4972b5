"""The relay's waves never hold one aggregate twice, so no message can be overtaken by its successor."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.kit.relay import waves


@given(st.lists(st.sampled_from("abcdef")))
def test_each_wave_holds_an_aggregate_once_and_order_is_kept(names: list[str]) -> None:
    rows = [{"aggregate_id": name, "seq": seq} for seq, name in enumerate(names)]
    split = waves(rows)  # pyright: ignore[reportArgumentType]
    for wave in split:
        assert len({row["aggregate_id"] for row in wave}) == len(wave)
    flat = [row for wave in split for row in wave]
    assert sorted(row["seq"] for row in flat) == list(range(len(names)))
    for name in set(names):
        own = [row["seq"] for row in flat if row["aggregate_id"] == name]
        assert own == sorted(own)

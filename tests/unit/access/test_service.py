"""Who may reach which unit."""

from typing import Any, cast

import pytest

from penstock.access.service import Access
from penstock.kit.errors import NotFound


class Anybody:
    async def authenticate(self, _: str | None, __: str | None) -> Any:
        return self

    def require(self, _: str) -> None: ...


@pytest.mark.parametrize("text", ["train", "x" * 5000, "alc_", "..%2Fadmin"])
async def test_a_name_in_the_place_of_an_id_is_told_where_the_id_is(text: str) -> None:
    nothing = cast("Any", None)
    with pytest.raises(NotFound) as refused:
        await Access(nothing, cast("Any", Anybody()), nothing).authorise("Bearer x", None, text)
    assert "an id (alc_…) is needed here, not a name" in refused.value.detail
    assert "penstock alloc list" in refused.value.detail
    assert len(refused.value.detail) < 400

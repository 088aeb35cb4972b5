"""Creates while the database has no space."""

import asyncpg
import pytest

from .conftest import Api

_FULL = """
create function public.disk_is_full() returns trigger language plpgsql as $$
begin raise exception 'could not extend file "base/1/2": No space left on device' using errcode = '{state}'; end $$;
create trigger full_disk before insert on kit.outbox execute function public.disk_is_full();
"""
_FREED = "drop function public.disk_is_full() cascade"


@pytest.mark.parametrize(("state", "code"), [("53100", "storage_full"), ("53200", "storage_full")])
async def test_a_create_without_space_is_refused_and_works_later(api: Api, state: str, code: str) -> None:
    body = {"name": f"while-full-{state}"}
    conn = await asyncpg.connect(api.database_url)
    try:
        await conn.execute(_FULL.format(state=state))
        try:
            refused = await api.call("POST", "/projects", json=body)
        finally:
            await conn.execute(_FREED)
    finally:
        await conn.close()
    assert (refused.status, refused.error["code"]) == (503, code)
    assert int(refused.headers["retry-after"]) > 0
    assert (await api.call("POST", "/projects", json=body)).status == 201

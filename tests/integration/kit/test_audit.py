"""The audit log cannot be changed, not even by us; and where somebody with more power does, its chain tells."""

import asyncio
from dataclasses import replace

import asyncpg
import msgspec
import pytest

from penstock.kit import audit, auditchain
from penstock.kit.audit import Actor
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.kit.paging import PageQuery
from penstock.wire.auditchain import PLATFORM, Broken, Head, verify
from penstock.wire.rest import ChainedAudit

OPERATOR = Caller(
    principal_id="usr_default",
    principal_kind="user",
    display_name="op",
    organisation_id="org_default",
    project_id="prj_default",
    role="owner",
    actions=frozenset({"audit.export"}),
)
SOMEONE = Actor(id="usr_someone", kind="user", organisation_id="org_one", project_id="prj_one")


async def record(database: Database, count: int, actor: Actor = SOMEONE) -> None:
    for number in range(count):
        async with database.transaction() as tx:
            await audit.record(tx, actor, "tests.run", f"target{number}", detail={"number": number, "half": 0.5})


async def links(database: Database, chain: str = "org_one") -> list[ChainedAudit]:
    found: list[ChainedAudit] = []
    cursor = None
    while True:
        async with database.read() as conn:
            page = await auditchain.page(conn, OPERATOR, chain, PageQuery(limit=3, cursor=cursor))
        found += page.items
        cursor = page.next_cursor
        if cursor is None:
            return found


async def tamper(database: Database, table: str, statement: str) -> None:
    """As somebody who owns the tables would."""
    async with database.transaction() as tx:
        await tx.execute(f"alter table {table} disable trigger user")
        await tx.execute(statement)
        await tx.execute(f"alter table {table} enable trigger user")


@pytest.mark.parametrize("table", ["kit.audit", "kit.audit_chain"])
@pytest.mark.parametrize("statement", ["update {} set {}", "delete from {}", "truncate {}"])
async def test_rows_are_only_ever_inserted(database: Database, table: str, statement: str) -> None:
    await record(database, 1)
    await auditchain.extend(database)
    column = "action = 'x'" if table == "kit.audit" else "position = 9"
    with pytest.raises(asyncpg.RaiseError, match="append-only"):
        async with database.transaction() as tx:
            await tx.execute(statement.format(table, column))


async def test_each_organisation_has_a_chain_that_holds(database: Database) -> None:
    await record(database, 7)
    await record(database, 2, audit.system("test"))
    assert await auditchain.extend(database) == 9
    await record(database, 1)
    assert await auditchain.extend(database) == 1
    assert await auditchain.extend(database) == 0
    found = await links(database)
    assert [link.entry.target_id for link in found if link.entry] == [f"target{n}" for n in (0, 1, 2, 3, 4, 5, 6, 0)]
    head = verify(found)
    assert isinstance(head, Head)
    assert head.position == 8
    assert isinstance(verify(await links(database, PLATFORM)), Head)
    async with database.read() as conn:
        chains = {chain.chain: chain for chain in await auditchain.chains(conn, OPERATOR)}
    assert (chains["org_one"].position, chains["org_one"].hash) == (8, head.hash.hex())
    assert chains["org_one"].unlinked == 0


async def test_an_edited_row_is_found(database: Database) -> None:
    await record(database, 5)
    await auditchain.extend(database)
    await tamper(database, "kit.audit", "update kit.audit set actor_id = 'usr_other' where target_id = 'target2'")
    broken = verify(await links(database))
    assert isinstance(broken, Broken)
    assert broken.position == 3


async def test_a_removed_row_is_found(database: Database) -> None:
    await record(database, 5)
    await auditchain.extend(database)
    await tamper(database, "kit.audit", "delete from kit.audit where target_id = 'target3'")
    broken = verify(await links(database))
    assert isinstance(broken, Broken)
    assert (broken.position, "gone" in broken.why) == (4, True)


async def test_a_cut_off_end_and_a_chain_written_anew_are_found_by_an_anchor(database: Database) -> None:
    await record(database, 5)
    await auditchain.extend(database)
    anchor = verify(await links(database))
    assert isinstance(anchor, Head)
    cut = (await links(database))[:4]
    assert isinstance(verify(cut), Head)
    assert isinstance(verify(cut, anchor), Broken)
    assert isinstance(verify(await links(database), replace(anchor, hash=bytes(32))), Broken)
    await record(database, 1)
    await auditchain.extend(database)
    assert isinstance(verify(await links(database), anchor), Head)


async def test_many_at_once_link_every_row_once(database: Database) -> None:
    await asyncio.gather(*(record(database, 10) for _ in range(4)), *(auditchain.extend(database) for _ in range(8)))
    await auditchain.extend(database)
    found = await links(database)
    assert len({link.audit_id for link in found}) == len(found) == 40
    assert isinstance(verify(found), Head)


async def test_a_row_that_commits_late_is_linked_in_its_place(database: Database) -> None:
    async with database.transaction() as slow:
        await audit.record(slow, SOMEONE, "tests.run", "late")
        await record(database, 2)
        assert await auditchain.extend(database) == 0
    assert await auditchain.extend(database) == 3
    assert [link.entry.target_id for link in await links(database) if link.entry] == ["late", "target0", "target1"]


async def test_rows_in_another_order_are_found(database: Database) -> None:
    await record(database, 4)
    await auditchain.extend(database)
    one, two, three, four = await links(database)
    swapped = [
        msgspec.structs.replace(three, position=two.position),
        msgspec.structs.replace(two, position=three.position),
    ]
    broken = verify([one, *swapped, four])
    assert isinstance(broken, Broken)
    assert broken.position == 2

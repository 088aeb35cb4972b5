"""Accounts, transfers and balances. Rows are only inserted; the database refuses what does not sum to zero."""

from functools import cache
from itertools import chain

from penstock.billing.model import Account, Transfer
from penstock.kit.db import Reader, Tx
from penstock.kit.telemetry import correlation_id


@cache
def _post(entries: int) -> str:
    """The statement for so many entries. Spelt out, they take a tenth less of the server's time than as arrays."""
    rows = ", ".join(f"(${7 + 2 * n}, ${8 + 2 * n}::bigint)" for n in range(entries))
    return f"""
        with posted as (
            insert into billing.transfers (id, kind, organisation_id, corrects, memo, correlation_id)
            values ($1, $2, $3, $4, $5, $6) on conflict (id) do nothing returning id
        )
        insert into billing.entries (transfer_id, account_id, amount_microusd)
        select id, account_id, amount from posted cross join (values {rows}) e (account_id, amount) returning true
    """  # noqa: S608


async def open_customer(tx: Tx, organisation_id: str) -> None:
    """Give the organisation its accounts, once."""
    await tx.execute(
        """
        with opened as (
            insert into billing.customers (organisation_id) values ($1) on conflict do nothing
        )
        insert into billing.accounts (id, organisation_id, kind)
        select $1 || '/' || kind, $1, kind from unnest($2::text[]) kind on conflict do nothing
        """,
        organisation_id,
        list(Account),
    )


async def lock_customer(tx: Tx, organisation_id: str) -> bool:
    """Whoever decides by a balance goes one by one; whether there is such a customer."""
    return bool(
        await tx.fetchval("select true from billing.customers where organisation_id = $1 for update", organisation_id)
    )


async def post(conn: Reader, transfer: Transfer) -> bool:
    """Write a transfer, unless one of this id is there already; whether it was written. It is one statement: alone it
    is a transaction of its own."""
    written = await conn.fetchval(
        _post(len(transfer.entries)),
        transfer.id,
        transfer.kind,
        transfer.organisation_id,
        transfer.corrects,
        transfer.memo,
        correlation_id(),
        *chain.from_iterable(transfer.entries.items()),
    )
    return written is not None


async def remaining(conn: Reader, transfer_id: str) -> dict[str, int]:
    """What is left of a transfer after all corrections of it, by account."""
    rows = await conn.fetch(
        """
        select e.account_id, sum(e.amount_microusd)::bigint as amount
        from billing.transfers t join billing.entries e on e.transfer_id = t.id
        where t.id = $1 or t.corrects = $1 group by e.account_id
        """,
        transfer_id,
    )
    return {row["account_id"]: row["amount"] for row in rows}


async def balance(conn: Reader, account_id: str) -> int:
    """The sum of an account's entries, as of the last that was committed."""
    return await conn.fetchval("select billing.balance_of($1)", account_id)


async def arrive(tx: Tx) -> None:
    """Note which cluster this is: in another than before, checkpoints do not count."""
    await tx.execute(
        "update billing.here set cluster = system_identifier from pg_control_system()"
        " where cluster <> system_identifier"
    )


async def take_checkpoints(tx: Tx, *, entries_min: int) -> int:
    """Sum up the entries of every account that has so many new ones, or whose checkpoint does not count here; how many
    accounts that were."""
    return await tx.fetchval(
        """
        with bound as materialized (
            select pg_snapshot_xmin(pg_current_snapshot()) as tx, cluster from billing.here
        ), grown as (
            select a.id, bound.cluster, bound.tx, coalesce(c.balance_microusd, 0) + n.amount as balance,
                coalesce(c.entries, 0) + n.entries as entries
            from bound cross join billing.accounts a
            left join billing.checkpoints kept on kept.account_id = a.id
            left join billing.checkpoints c
                on c.account_id = a.id and c.tx <= bound.tx and c.cluster = bound.cluster
            cross join lateral (
                select coalesce(sum(e.amount_microusd), 0)::bigint as amount, count(*) as entries
                from billing.entries e
                where e.account_id = a.id and e.tx >= coalesce(c.tx, '0'::xid8) and e.tx < bound.tx) n
            where n.entries >= $1 or (kept.account_id is not null and c.account_id is null)
        ), taken as (
            insert into billing.checkpoints (account_id, cluster, tx, balance_microusd, entries)
            select id, cluster, tx, balance, entries from grown
            on conflict (account_id) do update set cluster = excluded.cluster, tx = excluded.tx,
                balance_microusd = excluded.balance_microusd, entries = excluded.entries, taken_at = clock_timestamp()
            returning 1
        )
        select count(*) from taken
        """,
        entries_min,
    )

"""The ledger, usage and prices, balance states, budgets and payments."""

from alembic import op

revision = "0008"
down_revision = "0007"

#: Rows of these are never changed: by the owner's own grants, and by a trigger where grants do not count.
_APPEND_ONLY = ("accounts", "transfers", "entries", "usage")

LEDGER = (
    "create schema billing",
    # An organisation that ever had or owed anything. Whoever decides by its balance locks this row first.
    """
    create table billing.customers (
        organisation_id text primary key,
        state text not null default 'depleted'
            check (state in ('healthy', 'low_balance', 'auto_release_pending', 'depleted')),
        version bigint not null default 0,
        credit_limit_microusd bigint not null default 0 check (credit_limit_microusd >= 0),
        changed_at timestamptz not null default clock_timestamp()
    )
    """,
    # Who has to give back what runs: an organisation, one of its projects, or one of their keys. Nothing that comes
    # later, such as a payment, takes a request back.
    """
    create table billing.release_requests (
        id bigint generated always as identity primary key,
        organisation_id text not null,
        project_id text,
        key_id text,
        reason text not null,
        correlation_id text not null,
        requested_at timestamptz not null default clock_timestamp(),
        done_at timestamptz
    )
    """,
    "create index release_requests_open on billing.release_requests (id) where done_at is null",
    """
    create table billing.accounts (
        id text primary key,
        organisation_id text references billing.customers,
        kind text not null check (kind in ('balance', 'credit', 'holds', 'revenue', 'clearing', 'promotions')),
        currency text not null default 'USD' check (currency ~ '^[A-Z]{3}$'),
        unique (organisation_id, kind, currency),
        check ((organisation_id is null) = (kind in ('revenue', 'clearing', 'promotions')))
    )
    """,
    """
    insert into billing.accounts (id, kind)
    select 'platform/' || kind, kind from unnest(array['revenue', 'clearing', 'promotions']) kind
    """,
    # The id is the key that makes a transfer happen once: it is made of what the transfer is for.
    """
    create table billing.transfers (
        id text primary key check (length(id) between 1 and 200),
        kind text not null check (kind in ('usage', 'correction', 'payment', 'refund', 'dispute', 'grant')),
        organisation_id text not null,
        window_start timestamptz,
        run_at timestamptz,
        corrects text,
        memo text not null default '',
        correlation_id text not null default '',
        at timestamptz not null default clock_timestamp(),
        check ((kind = 'correction') = (corrects is not null)),
        check ((window_start is null) = (run_at is null))
    )
    """,
    "create index transfers_organisation on billing.transfers (organisation_id, at)",
    "create index transfers_window on billing.transfers (organisation_id, window_start) where window_start is not null",
    "create index transfers_corrected on billing.transfers (corrects) where corrects is not null",
    # No foreign keys to transfers and accounts: they lock the row that they name, for which the owner of these tables
    # has no permission, and every transfer would lock the platform's revenue. Triggers look instead: no row ever goes.
    """
    create table billing.entries (
        seq bigint generated always as identity,
        transfer_id text not null,
        account_id text not null,
        amount_microusd bigint not null check (amount_microusd <> 0),
        tx xid8 not null default pg_current_xact_id(),
        primary key (transfer_id, account_id)
    )
    """,
    "create index entries_account on billing.entries (account_id, tx, seq) include (amount_microusd)",
    # All entries of a transfer come in one statement, so each statement's must sum to zero in each currency. Looked up
    # one by one and added up in a loop: a join would be planned as a scan of all transfers, and grouping takes longer
    # than both inserts.
    """
    create function billing.require_zero_sum() returns trigger language plpgsql as
    $$ declare entry record; of_transfer text := ''; of_currency text := ''; total numeric := 0; begin
        for entry in
            select transfer_id, amount_microusd,
                (select a.currency from billing.accounts a where a.id = account_id) as currency,
                (select true from billing.transfers t where t.id = transfer_id) as known
            from added order by transfer_id, currency
        loop
            if entry.currency is null or entry.known is null then
                of_transfer := entry.transfer_id;
                total := 1;
                exit;
            end if;
            if entry.transfer_id <> of_transfer or entry.currency <> of_currency then
                exit when total <> 0;
                of_transfer := entry.transfer_id;
                of_currency := entry.currency;
            end if;
            total := total + entry.amount_microusd;
        end loop;
        if total <> 0 then
            raise exception 'transfer % does not sum to zero over accounts that exist', of_transfer
                using errcode = 'check_violation';
        end if;
        return null;
    end $$
    """,
    """
    create trigger entries_zero_sum after insert on billing.entries referencing new table as added
        for each statement execute function billing.require_zero_sum()
    """,
    """
    create function billing.require_corrected() returns trigger language plpgsql as
    $$ begin
        if not exists (select 1 from billing.transfers where id = new.corrects) then
            raise exception 'correction % names no transfer', new.id using errcode = 'foreign_key_violation';
        end if;
        return null;
    end $$
    """,
    """
    create trigger transfers_corrected after insert on billing.transfers
        for each row when (new.corrects is not null) execute function billing.require_corrected()
    """,
    """
    create function billing.stamp(at timestamptz) returns text language sql immutable as
    $$ select to_char(at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') $$
    """,
    # Which cluster this is, as whoever starts last found it: asking Postgres each time would read a file.
    "create table billing.here (one boolean primary key default true check (one), cluster bigint not null)",
    "insert into billing.here (cluster) select system_identifier from pg_control_system()",
    # The sum of an account's entries of all transactions before `tx`, which had all ended when it was taken.
    """
    create table billing.checkpoints (
        account_id text primary key,
        cluster bigint not null,
        tx xid8 not null,
        balance_microusd bigint not null,
        entries bigint not null,
        taken_at timestamptz not null default clock_timestamp()
    ) with (fillfactor = 50)
    """,
    # Transaction ids begin anew where the data was loaded into another cluster: there a checkpoint never counts, also
    # when the ids have come as far as its own. As a table of one row it becomes part of a query over many accounts,
    # which takes a third of the time of as many calls.
    """
    create function billing.balances(account text) returns table (microusd bigint) language sql stable as
    $$
        select (coalesce(c.balance_microusd, 0) + coalesce((
            select sum(e.amount_microusd) from billing.entries e
            where e.account_id = account and e.tx >= coalesce(c.tx, '0'::xid8)), 0))::bigint
        from (select 1) one left join billing.checkpoints c
            on c.account_id = account and c.tx <= pg_snapshot_xmin(pg_current_snapshot())
                and c.cluster = (select cluster from billing.here)
    $$
    """,
    # Never by a scan of all entries, which a plan from the time when there were few would do for each account.
    """
    create function billing.balance_of(account text) returns bigint language sql stable set enable_seqscan = off as
    $$ select microusd from billing.balances(account) $$
    """,
)

USAGE = (
    # What a unit of each meter costs, from when on. Rows are only added.
    """
    create table billing.prices (
        meter text not null check (meter ~ '^[a-z][a-z0-9_.]{0,62}$'),
        version int not null,
        price_microusd bigint not null check (price_microusd >= 0),
        per bigint not null check (per > 0),
        effective_at timestamptz not null default clock_timestamp(),
        created_at timestamptz not null default clock_timestamp(),
        created_by text not null,
        primary key (meter, version)
    )
    """,
    # The time and number of invocations are counted from the start, and free until an operator sets a price.
    """
    insert into billing.prices (meter, version, price_microusd, per, effective_at, created_by)
    select meter, 1, 0, 1, '2000-01-01T00:00:00Z', 'system:billing'
    from unnest(array['function.invocation_ms', 'function.invocations']) as m (meter)
    """,
    # One thing that is metered at one price: an allocation, or a meter of a function, a deployment, a key.
    # `quantity` is what was rated of it so far; of allocations, which are rated by time, it stays 0. Only they have
    # GPUs, which their price is for.
    """
    create table billing.series (
        id text primary key,
        organisation_id text not null,
        project_id text not null,
        key_id text,
        resource_kind text not null,
        resource_id text not null,
        meter text not null,
        detail text not null default '',
        gpus int not null default 0,
        labels jsonb not null default '{}',
        leased boolean not null default false,
        price_microusd bigint not null,
        per bigint not null check (per > 0),
        quantity bigint not null default 0,
        opened_at timestamptz not null default clock_timestamp()
    )
    """,
    "create index series_organisation on billing.series (organisation_id, project_id)",
    # What is metered besides time: few, and asked for with every balance.
    "create index series_metered on billing.series (organisation_id) where resource_kind <> 'allocation'",
    # A window of a series is charged once (nth 0) and corrected at most once (nth 1).
    """
    create table billing.usage (
        window_start timestamptz not null,
        series_id text not null,
        nth smallint not null default 0 check (nth in (0, 1)),
        from_at timestamptz not null,
        until_at timestamptz not null,
        quantity bigint not null,
        amount_microusd bigint not null,
        run_at timestamptz not null,
        primary key (window_start, series_id, nth),
        check (from_at < until_at),
        check (case nth when 0 then amount_microusd >= 0 and quantity >= 0 else amount_microusd <= 0 end)
    )
    """,
    # The same by day, for reports; the newest day also says until when a series is charged.
    """
    create table billing.daily (
        series_id text not null,
        day date not null,
        organisation_id text not null,
        quantity bigint not null,
        amount_microusd bigint not null,
        until_at timestamptz not null,
        primary key (series_id, day)
    ) with (fillfactor = 70)
    """,
    "create index daily_organisation on billing.daily (organisation_id, day)",
    # What other domains metered, once for each key. It waits for its window to end.
    """
    create table billing.recorded (
        key text not null,
        organisation_id text not null,
        project_id text not null,
        series_id text,
        meter text not null,
        quantity bigint not null,
        occurred_at timestamptz not null,
        recorded_at timestamptz not null default clock_timestamp(),
        state text not null check (state in ('pending', 'rated', 'refused')),
        reason text not null default '',
        run_at timestamptz,
        primary key (project_id, key)
    )
    """,
    "create index recorded_pending on billing.recorded (recorded_at) where state = 'pending'",
    "create index recorded_refused on billing.recorded (recorded_at) where state = 'refused'",
    # How far facts were read, and until when time is charged. Whoever accrues locks the row.
    """
    create table billing.progress (
        one boolean primary key default true check (one),
        tx xid8 not null default '0',
        seq bigint not null default 0,
        accrued_until timestamptz not null default date_trunc('minute', clock_timestamp())
    )
    """,
    "insert into billing.progress default values",
)

BUDGETS = (
    # A deleted budget stays while leases under it run: whoever changes a lease locks the budgets that it is part of.
    """
    create table billing.budgets (
        id text primary key,
        organisation_id text not null,
        project_id text not null,
        key_id text,
        period text not null check (period in ('hourly', 'daily', 'monthly')),
        limit_microusd bigint not null check (limit_microusd >= 0),
        action text not null check (action in ('reject', 'warn')),
        version bigint not null default 0,
        created_at timestamptz not null default clock_timestamp(),
        updated_at timestamptz not null default clock_timestamp(),
        deleted_at timestamptz
    )
    """,
    """
    create unique index budgets_subject on billing.budgets (project_id, coalesce(key_id, ''), period)
        where deleted_at is null
    """,
    "create index budgets_project on billing.budgets (project_id, id)",
    """
    create function billing.period_start(period text, at timestamptz) returns timestamptz language sql stable as
    $$ select date_trunc(case period when 'hourly' then 'hour' when 'daily' then 'day' else 'month' end, at, 'UTC') $$
    """,
    """
    create function billing.period_end(period text, at timestamptz) returns timestamptz language sql stable as
    $$ select (billing.period_start(period, at) at time zone 'UTC' + case period when 'hourly' then interval '1 hour'
        when 'daily' then interval '1 day' else interval '1 month' end) at time zone 'UTC' $$
    """,
    # What the meter charged under a budget in one period. The meter alone adds to it.
    """
    create table billing.spending (
        budget_id text not null references billing.budgets on delete cascade,
        period_start timestamptz not null,
        spent_microusd bigint not null default 0,
        primary key (budget_id, period_start)
    )
    """,
    # What leases took of a period, what is held for allocations that run, and what was told about it. It stands apart
    # from what the meter writes, so that nobody on a hot path ever waits for a run over all allocations. Whoever
    # changes a row has locked its budget.
    """
    create table billing.budget_periods (
        budget_id text not null references billing.budgets on delete cascade,
        period_start timestamptz not null,
        settled_microusd bigint not null default 0,
        reserved_microusd bigint not null default 0 check (reserved_microusd >= 0),
        held_microusd bigint not null default 0,
        warned_at timestamptz,
        exhausted_at timestamptz,
        released_at timestamptz,
        primary key (budget_id, period_start)
    ) with (fillfactor = 50)
    """,
    # A lease that lapsed was seen to be over by somebody who gave its money away: it is never settled, even if the
    # clock is set back.
    """
    create table billing.leases (
        id text primary key,
        project_id text not null,
        key_id text,
        amount_microusd bigint not null check (amount_microusd > 0),
        holder text not null,
        created_at timestamptz not null default clock_timestamp(),
        expires_at timestamptz not null,
        lapsed_at timestamptz
    )
    """,
    "create index leases_expiry on billing.leases (expires_at)",
    "create index leases_project on billing.leases (project_id)",
    # The budgets and periods under which a lease is reserved; amount and end are the lease's.
    """
    create table billing.lease_parts (
        lease_id text not null references billing.leases on delete cascade,
        budget_id text not null,
        period_start timestamptz not null,
        amount_microusd bigint not null,
        expires_at timestamptz not null,
        primary key (lease_id, budget_id)
    )
    """,
    "create index lease_parts_budget on billing.lease_parts (budget_id, expires_at)",
    # What leases of a project and key spent, by the hour in which they were reserved: for budgets that come later.
    """
    create table billing.settled (
        project_id text not null,
        key_id text not null,
        hour timestamptz not null,
        amount_microusd bigint not null,
        primary key (project_id, hour, key_id)
    )
    """,
    # Every budget with its period at a moment, which is never a volatile expression: then it becomes part of the query
    # that asks. A lease that is over counts as given back, swept or not.
    """
    create function billing.budgets_at(moment timestamptz) returns table (
        id text, organisation_id text, project_id text, key_id text, period text, limit_microusd bigint, action text,
        created_at timestamptz, updated_at timestamptz, starts_at timestamptz, ends_at timestamptz,
        spent_microusd bigint, reserved_microusd bigint, held_microusd bigint
    ) language sql stable as
    $$
        select b.id, b.organisation_id, b.project_id, b.key_id, b.period, b.limit_microusd, b.action, b.created_at,
            b.updated_at, billing.period_start(b.period, moment), billing.period_end(b.period, moment),
            coalesce(s.spent_microusd, 0) + coalesce(p.settled_microusd, 0),
            coalesce(p.reserved_microusd, 0) - coalesce((
                select sum(l.amount_microusd) from billing.lease_parts l where l.budget_id = b.id
                and l.period_start = billing.period_start(b.period, moment) and l.expires_at <= moment), 0)::bigint,
            coalesce(p.held_microusd, 0)
        from billing.budgets b
        left join billing.spending s
            on s.budget_id = b.id and s.period_start = billing.period_start(b.period, moment)
        left join billing.budget_periods p
            on p.budget_id = b.id and p.period_start = billing.period_start(b.period, moment)
        where b.deleted_at is null
    $$
    """,
    # Locks all budgets that apply, ends the leases that are over, then looks: a single statement would look with eyes
    # from before it had to wait.
    """
    create function billing.lock_budgets(project text, key text, at timestamptz) returns table (
        moment timestamptz, id text, organisation_id text, project_id text, key_id text, period text,
        limit_microusd bigint, action text, created_at timestamptz, updated_at timestamptz, starts_at timestamptz,
        ends_at timestamptz, spent_microusd bigint, reserved_microusd bigint, held_microusd bigint
    ) language plpgsql as
    $$ declare locked text[]; begin
        locked := array(select b.id from billing.budgets b
            where b.project_id = project and (b.key_id is null or b.key_id = key) and b.deleted_at is null
            order by b.id for no key update);
        moment := coalesce(at, clock_timestamp());
        update billing.leases l set lapsed_at = moment from billing.lease_parts p
            where p.budget_id = any(locked) and p.expires_at <= moment and l.id = p.lease_id and l.lapsed_at is null;
        return query select moment, b.* from billing.budgets_at(moment) b where b.id = any(locked);
    end $$
    """,
)

FUNDS = (
    # Until when time counts at a moment: to its end, and while its node is silent to the last list of its units. Nodes
    # name their units every few seconds: a list that is due counts as one that has come. Whole seconds of it, so that
    # the windows of nodes that fell silent together go on together.
    """
    create function billing.counted_until(ended timestamptz, heard timestamptz, moment timestamptz)
    returns timestamptz language sql stable as
    $$ select least(moment, coalesce(ended,
        case when heard < moment - interval '15 seconds' then date_trunc('second', heard) end)) $$
    """,
    # Allocations on the meter, each with the moment until which it is charged: after a silence that is earlier than
    # `billing.progress` says.
    """
    create view billing.metered as
        select b.*, coalesce(last.until_at, b.active_at) as since
        from compute.billable b
        left join lateral (
            select d.until_at from billing.daily d where d.series_id = b.allocation_id order by d.day desc limit 1
        ) last on true
    """,
    # What allocations have cost since they were last charged, until their end.
    """
    create view billing.unbilled as
        select m.organisation_id, m.price_microusd_per_hour, m.billing_ended_at,
            m.price_microusd_per_hour * greatest(0, extract(epoch from
                billing.counted_until(m.billing_ended_at, m.heard_until, statement_timestamp()) - m.since)) / 3600
                as cost_microusd
        from billing.metered m
    """,
    # Locks the customer, then looks: a single statement would look with eyes from before it had to wait.
    """
    create function billing.lock_purse(
        payer text, project text,
        out funds_microusd bigint, out committed_microusd_per_hour bigint, out budgeted boolean
    ) language plpgsql set enable_seqscan = off as
    $$ begin
        select c.credit_limit_microusd into funds_microusd
        from billing.customers c where c.organisation_id = payer for update;
        if not found then return; end if;
        select funds_microusd + (select microusd from billing.balances(payer || '/balance'))
                + (select microusd from billing.balances(payer || '/credit')) - coalesce((
                    select ceil(sum(u.cost_microusd)) from billing.unbilled u where u.organisation_id = payer), 0),
            coalesce((select sum(price_microusd_per_hour) from compute.commitments where organisation_id = payer), 0),
            exists (select 1 from billing.budgets b where b.project_id = project and b.deleted_at is null)
        into funds_microusd, committed_microusd_per_hour, budgeted;
    end $$
    """,
)

PAYMENTS = (
    """
    create table billing.payments (
        id text primary key,
        organisation_id text not null,
        project_id text not null,
        provider text not null,
        state text not null check (state in ('open', 'succeeded', 'failed', 'expired')),
        version bigint not null default 1,
        amount_microusd bigint not null check (amount_microusd > 0),
        currency text not null,
        refunded_microusd bigint not null default 0 check (refunded_microusd between 0 and amount_microusd),
        session_id text,
        intent_id text,
        checkout_url text not null default '',
        reason text not null default '',
        created_by text not null,
        correlation_id text not null,
        created_at timestamptz not null default clock_timestamp(),
        completed_at timestamptz
    )
    """,
    "create index payments_organisation on billing.payments (organisation_id, id)",
    "create unique index payments_session on billing.payments (provider, session_id) where session_id is not null",
    "create index payments_abandoned on billing.payments (created_at) where state = 'open' and session_id is null",
    "create unique index payments_intent on billing.payments (provider, intent_id) where intent_id is not null",
    # The provider's events as they came, each once.
    """
    create table billing.provider_events (
        provider text not null,
        event_id text not null,
        type text not null,
        body bytea not null,
        state text not null default 'received' check (state in
            ('received', 'waiting', 'applied', 'ignored', 'unmatched', 'rejected', 'held', 'discarded')),
        reason text not null default '',
        payment_id text,
        attempts int not null default 0,
        received_at timestamptz not null default clock_timestamp(),
        due_at timestamptz not null default clock_timestamp(),
        handled_at timestamptz,
        primary key (provider, event_id)
    )
    """,
    "create index provider_events_due on billing.provider_events (due_at) where state in ('received', 'waiting')",
    "create index provider_events_state on billing.provider_events (state, received_at)",
    "create index provider_events_received on billing.provider_events (received_at, event_id)",
    "create index provider_events_id on billing.provider_events (event_id)",
    """
    create table billing.refunds (
        id text primary key,
        payment_id text not null references billing.payments,
        organisation_id text not null,
        state text not null check (state in ('requested', 'pending', 'succeeded', 'failed')),
        version bigint not null default 1,
        amount_microusd bigint not null check (amount_microusd > 0),
        provider_refund_id text,
        reason text not null,
        failure text not null default '',
        attempts int not null default 0,
        due_at timestamptz,
        created_by text not null,
        correlation_id text not null,
        created_at timestamptz not null default clock_timestamp(),
        completed_at timestamptz
    )
    """,
    "create index refunds_payment on billing.refunds (payment_id)",
    "create index refunds_due on billing.refunds (due_at) where state in ('requested', 'pending')",
    """
    create unique index refunds_provider on billing.refunds (payment_id, provider_refund_id)
        where provider_refund_id is not null
    """,
    """
    create table billing.disputes (
        id text primary key,
        payment_id text not null references billing.payments,
        state text not null check (state in ('open', 'won', 'lost')),
        amount_microusd bigint not null check (amount_microusd > 0),
        opened_at timestamptz not null default clock_timestamp(),
        closed_at timestamptz
    )
    """,
)


def upgrade() -> None:
    """Create the tables of billing."""
    for statement in (*LEDGER, *USAGE, *BUDGETS, *FUNDS, *PAYMENTS):
        op.execute(statement)
    for table in _APPEND_ONLY:
        op.execute(f"revoke update, delete, truncate on billing.{table} from public, current_user")
        op.execute(
            f"create trigger {table}_append_only before update or delete or truncate on billing.{table}"
            " for each statement execute function kit.refuse_change()"
        )

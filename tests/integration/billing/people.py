"""Who looks at the ledger in tests, and what they ask."""

from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from integration.billing.stage import Run, Stage
from penstock.billing.periods import Period
from penstock.billing.service import costs, statements
from penstock.identity.model import Role, actions
from penstock.kit.caller import Caller
from penstock.kit.ids import new_id
from penstock.kit.paging import PageQuery
from penstock.wire import rest

DAY: Final = timedelta(days=1)


def someone(role: Role, *, org: str = "org_a", project: str | None = None, operator: bool = False) -> Caller:
    """A member of an organisation."""
    return Caller(
        principal_id=new_id("usr"),
        principal_kind="user",
        display_name="someone",
        organisation_id=org,
        project_id=project or f"prj_{org}",
        role=role,
        actions=actions(role, operator=operator),
        operator=operator,
    )


OWNER: Final = someone(Role.OWNER)
OPERATOR: Final = someone(Role.OWNER, org="org_default", operator=True)


def days(first: date, last: date) -> Period:
    """A time."""
    return Period(from_day=first, to_day=last)


def lately() -> Period:
    """When transfers of this test were posted, whatever happens at midnight."""
    today = datetime.now(UTC).date()
    return days(today - DAY, today + DAY)


async def costs_of(
    stage: Stage,
    period: Period,
    by: str = "project",
    *,
    caller: Caller = OWNER,
    project: str | None = None,
    **page: Any,
) -> rest.CostReport:
    """A report."""
    async with stage.db.read() as conn:
        return await costs.usage(conn, caller, period, by, project, PageQuery(**page))


async def statement_of(
    stage: Stage, *, caller: Caller = OWNER, period: Period | None = None, **page: Any
) -> rest.Statement:
    """A page of a statement, of what was posted lately."""
    async with stage.db.transaction() as tx:
        return await statements.statement(tx, caller, period or lately(), PageQuery(**page))


async def move(stage: Stage, run: Run, *, project: str, key: str | None = None, **labels: str) -> None:
    """The allocation belongs to another project, key and team."""
    async with stage.db.transaction() as tx:
        await tx.execute(
            "update compute.allocations set project_id = $2, key_id = $3, labels = $4 where id = $1",
            run.id,
            project,
            key,
            labels,
        )

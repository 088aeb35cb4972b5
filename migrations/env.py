"""Runs the migrations against the database that `kit.migrate` names. What was applied is remembered with its digest:
with a migration that was edited later, the database would not be what the code believes."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

from alembic import context
from alembic.util import CommandError
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import create_async_engine

_APPLIED = "create table if not exists public.migrations_applied (revision text primary key, digest text not null)"


def _migrate(connection: Connection) -> None:
    context.configure(
        connection=connection, version_table="migrations", version_table_schema="public", on_version_apply=_remember
    )
    with context.begin_transaction():
        connection.exec_driver_sql("select pg_advisory_xact_lock(7000)")
        connection.exec_driver_sql(_APPLIED)
        _compare(connection)
        context.run_migrations()


def _compare(connection: Connection) -> None:
    rows = connection.exec_driver_sql("select revision, digest from public.migrations_applied")
    applied: dict[str, str | None] = {row.revision: row.digest for row in rows}
    if (revision := context.get_context().get_current_revision()) is not None:
        applied.setdefault(revision, None)
    here = {script.revision: _digest(script.path) for script in context.script.walk_revisions()}
    for revision, digest in sorted(applied.items()):
        if digest is None or here.get(revision) != digest:
            raise CommandError(f"its migration {revision} is not the one here")


def _remember(*, ctx: Any, step: Any, **_: object) -> None:
    script = context.script.get_revision(step.up_revision_id)
    ctx.connection.execute(
        text("insert into public.migrations_applied values (:revision, :digest)"),
        {"revision": script.revision, "digest": _digest(script.path)},
    )


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


async def _run() -> None:
    engine = create_async_engine(context.config.attributes["url"])
    try:
        async with engine.connect() as connection:
            await connection.run_sync(_migrate)
            await connection.commit()
    finally:
        await engine.dispose()


asyncio.run(_run())

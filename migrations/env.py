"""Runs the migrations against the database that `kit.migrate` names."""

import asyncio

from alembic import context
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import create_async_engine


def _migrate(connection: Connection) -> None:
    context.configure(connection=connection, version_table="migrations", version_table_schema="public")
    with context.begin_transaction():
        connection.exec_driver_sql("select pg_advisory_xact_lock(7000)")
        context.run_migrations()


async def _run() -> None:
    engine = create_async_engine(context.config.attributes["url"])
    async with engine.connect() as connection:
        await connection.run_sync(_migrate)
        await connection.commit()
    await engine.dispose()


asyncio.run(_run())

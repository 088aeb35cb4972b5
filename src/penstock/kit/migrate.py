"""Brings a database to the newest schema; several processes may call it at once."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util import CommandError

from penstock.kit.errors import Conflict


class OtherSchema(Conflict):
    """The database was brought to its schema by migrations that are not the ones here."""

    code = "schema_differs"


def migrate(database_url: str) -> None:
    """Apply what is missing; OtherSchema if what was applied is something else. Runs an event loop of its own: call it
    outside of one."""
    config = Config()
    config.set_main_option("script_location", str(_folder()))
    config.attributes["url"] = database_url.replace("postgresql://", "postgresql+asyncpg://", 1)
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise OtherSchema(
            f"the database's schema is of another version of Penstock: {error}; use that version, or another database"
        ) from error


def _folder() -> Path:
    package = Path(__file__).parent.parent
    installed = package / "migrations"
    return installed if installed.is_dir() else package.parent.parent / "migrations"

"""Brings a database to the newest schema; several processes may call it at once."""

from pathlib import Path

from alembic import command
from alembic.config import Config


def migrate(database_url: str) -> None:
    """Apply what is missing. Runs an event loop of its own: call it outside of one."""
    config = Config()
    config.set_main_option("script_location", str(_folder()))
    config.attributes["url"] = database_url.replace("postgresql://", "postgresql+asyncpg://", 1)
    command.upgrade(config, "head")


def _folder() -> Path:
    package = Path(__file__).parent.parent
    installed = package / "migrations"
    return installed if installed.is_dir() else package.parent.parent / "migrations"

"""Settings for operators' commands that talk to the database: the environment's, else those of the local instance."""

from penstock.cli.local import data_folder
from penstock.cli.session import Session
from penstock.processes.up.folder import DataFolder


def environ(session: Session) -> dict[str, str]:
    """The caller's environment. Where it names no database and no configuration file, the running local instance's
    settings fill it up."""
    given = dict(session.environ)
    if given.get("PENSTOCK_DATABASE_URL") or given.get("PENSTOCK_CONFIG"):
        return given
    folder = DataFolder(data_folder(session.flags.data, session.environ))
    found = folder.instance() if folder.holder() is not None else None
    if found is None:
        return given
    given["PENSTOCK_DATABASE_URL"] = found.database_url
    given["PENSTOCK_SECRETS_DIR"] = given.get("PENSTOCK_SECRETS_DIR") or found.secrets_dir
    return given

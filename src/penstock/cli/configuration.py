"""Shows what the command line would use, and why."""

from penstock.cli.output import ID, NORMAL, Format
from penstock.cli.resolve import Value
from penstock.cli.session import Session, command, group

app = group("config", "Show the configuration.")


@command(app, "show", example="penstock config show --profile staging")
def show(session: Session) -> None:
    """Show each value with its source. Order: flag, environment, profile, local instance; empty means unset."""
    resolved = session.resolved()
    key = resolved.key and Value(mask(resolved.key.text), resolved.key.source)
    values = {
        "config_file": resolved.config_file and Value(str(resolved.config_file), "PENSTOCK_CONFIG_FILE or XDG"),
        "data_folder": resolved.data_folder and Value(str(resolved.data_folder), "--data, PENSTOCK_DATA or install"),
        "profile": resolved.profile,
        "api_url": resolved.api_url,
        "gateway_url": resolved.gateway_url,
        "project": resolved.project,
        "key": key,
    }
    rows = {name: value or Value("", "not set") for name, value in values.items()}
    if session.output.format is Format.JSON:
        session.output.json(
            {name: {"value": value.text or None, "source": value.source} for name, value in rows.items()}
        )
    else:
        shown = [[name, value.text, value.source] for name, value in rows.items()]
        session.output.rows(["name", "value", "source"], shown, ranks=[ID, ID, NORMAL])


def mask(key: str) -> str:
    """Enough of a key to tell it from others."""
    return key[:8] + "…" if len(key) > 16 else "…"

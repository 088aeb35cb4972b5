"""Whether a definition makes sense at all, before anything is locked or read.

What a unit may be (image, variables, command, secrets, SKU, runtime) is compute's to say: see `ports.Templates`.
"""

from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from penstock.kit.errors import Invalid
from penstock.serverless.errors import BadDefinition, BadSchedule
from penstock.serverless.model import FOREIGN, NAME
from penstock.wire.rest import FrameworkUse, FunctionPut, ScheduleUse
from penstock.wire.serverless import SOCKET_FOLDER

#: What a Unix socket's address can hold.
SOCKET_BYTES_MAX: Final = 107
_DEFAULT_PROJECT: Final = "prj_default"


def name(project_id: str, text: str, *, field: str = "name") -> str:
    """The name as it is kept, in small letters."""
    lowered = text.lower()
    if not NAME.fullmatch(lowered):
        raise Invalid(f"{field} must be 1 to 63 letters, digits, underscores and hyphens", field=field)
    if project_id == _DEFAULT_PROJECT and FOREIGN.fullmatch(lowered):
        raise Invalid(f"{field} must not look like a project's id in the default project", field=field)
    return lowered


def definition(body: FunctionPut) -> None:
    """Pass, or an error that names the field."""
    if body.code is not None and body.command:
        raise BadDefinition("code and command exclude each other: a command serves the socket itself", field="command")
    if body.handler and body.code is None:
        raise BadDefinition("handler needs code", field="handler")
    if body.code is not None and not body.handler:
        raise BadDefinition("code needs a handler, such as module:name", field="handler")
    if body.workers_min > body.workers_max:
        raise BadDefinition(f"workers_min must be at most workers_max, {body.workers_max}", field="workers_min")
    framework(body.framework)
    if body.schedule is not None:
        next_time(body.schedule, datetime.now(UTC))


def framework(use: FrameworkUse) -> None:
    """The socket lies in the folder that the sidecar sees, and its address fits."""
    path = use.socketPath
    if not path.startswith(f"{SOCKET_FOLDER}/") or {"", ".", ".."} & set(path[len(SOCKET_FOLDER) + 1 :].split("/")):
        raise BadDefinition(f"socketPath must lie under {SOCKET_FOLDER}/", field="framework.socketPath")
    if len(path.encode()) > SOCKET_BYTES_MAX or not path.isprintable():
        raise BadDefinition(f"socketPath must be at most {SOCKET_BYTES_MAX} bytes", field="framework.socketPath")


def next_time(schedule: ScheduleUse, after: datetime) -> datetime:
    """When it comes next, or BadSchedule. Times that a change of clocks skips or repeats come once."""
    try:
        zone = ZoneInfo(schedule.timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        message = "timezone must be a name such as UTC or Europe/Berlin"
        raise BadSchedule(message, field="schedule.timezone") from error
    if len(schedule.cron.split()) != 5:
        raise BadSchedule("cron must have five fields: minute hour day month weekday", field="schedule.cron")
    try:
        found = next(CronSim(schedule.cron, after.astimezone(zone)))
    except CronSimError as error:
        raise BadSchedule(f"cron cannot be read: {error}", field="schedule.cron") from error
    except StopIteration as error:
        raise BadSchedule("cron never comes", field="schedule.cron") from error
    # Whoever reads clocks that were just put back could see a time that has passed.
    return max(found.astimezone(UTC), after + timedelta(seconds=1))

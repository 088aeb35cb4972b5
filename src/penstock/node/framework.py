"""What a framework in a unit is told, and how the platform's own one is started."""

from pathlib import PurePosixPath
from typing import Final

from penstock.node.drivers import Places
from penstock.sdk import tenant
from penstock.wire.tasks import Serving

#: By its name, as the unit's own path has it first: the zygote of stock is that very interpreter.
_PYTHON: Final = "python"


def command(places: Places) -> list[str]:
    """The platform's framework as a unit's command."""
    return [_PYTHON, f"{places.framework}/{tenant.ENTRY_NAME}"]


def variables(serving: Serving, places: Places) -> dict[str, str]:
    """All that a framework knows of where it is; ours is also told what to run."""
    told = {
        "SERVERLESS_REQUEST_ID": serving.function,
        "SERVERLESS_WORKER_NAME": serving.worker,
        "SERVERLESS_WORKER_NAMESPACE": serving.project_id,
        tenant.SOCKET: f"{places.sockets}/{socket_name(serving)}",
        tenant.INVOKE: serving.invoke_path,
        tenant.HEALTH: serving.health_path,
    }
    if serving.code is not None:
        told[tenant.CODE] = places.code
    if serving.framework:
        told |= {tenant.HANDLER: serving.handler, tenant.CONCURRENCY: str(serving.slots)}
    return told


def socket_name(serving: Serving) -> str:
    """The file of the framework's socket, which may be given by its whole path."""
    return PurePosixPath(serving.socket).name

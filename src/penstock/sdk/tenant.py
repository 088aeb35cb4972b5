"""What of ours is put into a function's unit: a folder of plain Python, and how it is started.

The files of `FILES` keep their paths below the folder, beside `ENTRY_NAME` with the text `ENTRY`. The unit's command
is then `python <folder>/framework.py` with the variables below; the folder may be read-only.
"""

from pathlib import Path
from typing import Final

#: Below the folder that holds the package, here as in the unit.
FILES: Final = (
    "penstock/__init__.py",
    "penstock/sdk/__init__.py",
    "penstock/sdk/functions/__init__.py",
    "penstock/sdk/functions/app.py",
    "penstock/sdk/functions/classes.py",
    "penstock/sdk/functions/errors.py",
    "penstock/sdk/functions/function.py",
    "penstock/sdk/functions/imports.py",
    "penstock/sdk/functions/invocation.py",
    "penstock/sdk/functions/objects.py",
    "penstock/sdk/functions/options.py",
    "penstock/sdk/functions/outcome.py",
    "penstock/sdk/functions/transport.py",
    "penstock/sdk/functions/values.py",
    "penstock/sdk/framework/__init__.py",
    "penstock/sdk/framework/calls.py",
    "penstock/sdk/framework/capture.py",
    "penstock/sdk/framework/connection.py",
    "penstock/sdk/framework/exchange.py",
    "penstock/sdk/framework/failures.py",
    "penstock/sdk/framework/handler.py",
    "penstock/sdk/framework/main.py",
    "penstock/sdk/framework/objects.py",
    "penstock/sdk/framework/server.py",
    "penstock/sdk/framework/threads.py",
)
ENTRY_NAME: Final = "framework.py"
ENTRY: Final = 'from penstock.sdk.framework.main import main\n\nif __name__ == "__main__":\n    main()\n'
#: Imported by a warm interpreter before there is a tenant, with the folder on its path.
PRELOAD: Final = ("penstock.sdk.framework.main",)

#: Variables that the framework reads. Without a handler it answers with what it was given.
HANDLER: Final = "PENSTOCK_HANDLER"
#: The folder with the tenant's code; it comes first on the path. The default is where the process starts.
CODE: Final = "PENSTOCK_CODE"
#: How many invocations may run at once.
CONCURRENCY: Final = "PENSTOCK_CONCURRENCY"
#: As the source has them.
SOCKET: Final = "SERVERLESS_FRAMEWORK_SOCKET_PATH"
INVOKE: Final = "SERVERLESS_FRAMEWORK_INVOKE_PATH"
HEALTH: Final = "SERVERLESS_FRAMEWORK_HEALTH_PATH"


def sources() -> dict[str, bytes]:
    """Every file by its path below the folder, the entry included."""
    root = Path(__file__).parents[2]
    return {**{name: (root / name).read_bytes() for name in FILES}, ENTRY_NAME: ENTRY.encode()}

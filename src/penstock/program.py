"""A user's own program: it reaches the cloud as the command line would, by the same variables, profile or local
instance."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.sdk.client import Client
    from penstock.sdk.remote import Outside


def connect(client: "Client | None" = None) -> "Outside":
    """Call functions by this client from now on; without one, by that of the command line."""
    from penstock.cli.errors import CliError
    from penstock.cli.session import Session
    from penstock.sdk import remote
    from penstock.sdk.functions.errors import FunctionError

    try:
        return remote.connect(client or Session(os.environ).client())
    except CliError as error:
        raise FunctionError(error.message) from None

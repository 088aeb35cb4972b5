"""A user's own program: it reaches the cloud as the command line would, by the same variables, profile or local
instance."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.sdk.client import Client
    from penstock.sdk.remote import Outside
    from penstock.sdk.target import Target


def connect(client: "Client | None" = None) -> "Outside":
    """Call functions by this client from now on; without one, by that of the command line."""
    from penstock.sdk import remote
    from penstock.sdk.client import Client
    from penstock.sdk.errors import NotConfigured
    from penstock.sdk.functions.errors import FunctionError

    try:
        return remote.connect(client or Client())
    except NotConfigured as error:
        raise FunctionError(error.message) from None


def target(api_url: str | None, key: str | None) -> "Target":
    """Where the command line would go and as whom, with these in the place of what it finds; NotConfigured with its
    words."""
    from penstock.cli.errors import CliError
    from penstock.cli.resolve import Flags
    from penstock.cli.session import Session
    from penstock.sdk.errors import NotConfigured
    from penstock.sdk.target import Target

    environ = {**os.environ, "PENSTOCK_API_KEY": key} if key else os.environ
    try:
        found = Session(environ, flags=Flags(api_url=api_url)).target()
    except CliError as error:
        raise NotConfigured(error.message, code=error.code, field=error.field) from None
    return Target.of(**found)

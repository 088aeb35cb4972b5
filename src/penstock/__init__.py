"""Penstock turns a set of GPU hosts into a cloud."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.program import connect as connect
    from penstock.sdk.client import AsyncClient as AsyncClient
    from penstock.sdk.client import Client as Client
    from penstock.sdk.functions.app import App as App
    from penstock.sdk.functions.classes import enter as enter
    from penstock.sdk.functions.classes import exit as exit  # noqa: A004
    from penstock.sdk.functions.classes import method as method
    from penstock.sdk.functions.errors import FunctionCancelled as FunctionCancelled
    from penstock.sdk.functions.errors import FunctionDeadLettered as FunctionDeadLettered
    from penstock.sdk.functions.errors import FunctionError as FunctionError
    from penstock.sdk.functions.errors import FunctionExpired as FunctionExpired
    from penstock.sdk.functions.errors import FunctionFailed as FunctionFailed
    from penstock.sdk.functions.errors import InvocationCancelled as InvocationCancelled
    from penstock.sdk.functions.errors import ObjectError as ObjectError
    from penstock.sdk.functions.errors import ObjectNotFound as ObjectNotFound
    from penstock.sdk.functions.errors import RemoteError as RemoteError
    from penstock.sdk.functions.errors import ResultTimeout as ResultTimeout
    from penstock.sdk.functions.function import Function as Function
    from penstock.sdk.functions.function import FunctionCall as FunctionCall
    from penstock.sdk.functions.invocation import Invocation as Invocation
    from penstock.sdk.functions.invocation import current_invocation as current_invocation
    from penstock.sdk.functions.invocation import progress as progress
    from penstock.sdk.functions.objects import objects as objects
    from penstock.sdk.functions.options import Cron as Cron

_FUNCTIONS = "penstock.sdk.functions"
#: Imported when it is first asked for: processes, units and the command line start without what they do not use.
_HOMES = {
    "penstock.sdk.client": ("AsyncClient", "Client"),
    "penstock.program": ("connect",),
    f"{_FUNCTIONS}.app": ("App",),
    f"{_FUNCTIONS}.classes": ("enter", "exit", "method"),
    f"{_FUNCTIONS}.errors": (
        *("FunctionCancelled", "FunctionDeadLettered", "FunctionError", "FunctionExpired", "FunctionFailed"),
        *("InvocationCancelled", "ObjectError", "ObjectNotFound", "RemoteError", "ResultTimeout"),
    ),
    f"{_FUNCTIONS}.function": ("Function", "FunctionCall"),
    f"{_FUNCTIONS}.invocation": ("Invocation", "current_invocation", "progress"),
    f"{_FUNCTIONS}.objects": ("objects",),
    f"{_FUNCTIONS}.options": ("Cron",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [*_HOME]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_HOME[name]), name)
    if _HOME[name].startswith(_FUNCTIONS):
        # Only here it is known who the user of this program is.
        import_module(f"{_FUNCTIONS}.transport").otherwise(lambda: import_module("penstock.program").connect())
    return found

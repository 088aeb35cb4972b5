"""A failure as it is told: what, and what to do next."""

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.cli.errors import CliError, exit_code
from penstock.cli.output import Format
from penstock.cli.text import clean, clean_json

if TYPE_CHECKING:
    from penstock.cli.session import Session
    from penstock.sdk.errors import SdkError

LOGIN_AGAIN: Final = "login again: run `penstock login`"
_CAPACITY: Final = "`--wait-capacity 600` waits for free GPUs, `penstock sku list` shows what is free"
#: The next step after a refusal, by its code.
_BY_CODE: Final[Mapping[str, str]] = {
    "compute.out_of_capacity": _CAPACITY,
    "compute.no_single_node": _CAPACITY,
    "compute.unhealthy": "`penstock sku list` shows what is free",
    "compute.quota_exceeded": "release something (`penstock alloc list`), or ask an operator for more",
    "compute.unknown_sku": "see `penstock sku list`",
    "compute.unknown_runtime": "see `penstock runtime list`",
    "billing.insufficient_funds": "see `penstock billing balance`",
    "serverless.queue_full": "see `penstock fn list`",
    "unreachable": "see the address with `penstock config show`; `penstock status` shows the local cloud",
}
#: Where what there is can be seen, by the group of commands.
_LISTS: Final[Mapping[str, str]] = {
    "alloc": "see `penstock alloc list --all`",
    "fn": "see `penstock fn list`; `penstock fn deploy` makes functions",
    "secret": "see `penstock secret list`",
    "object": "see `penstock object list`",
    "sku": "see `penstock sku list`",
    "stock": "see `penstock stock list`",
    "runtime": "see `penstock runtime list`",
    "webhook": "see `penstock webhook list`",
    "project": "see `penstock project list`",
    "member": "see `penstock project list` and `penstock member list`",
    "key": "see `penstock key list`",
    "service-account": "see `penstock service-account list`",
    "user": "see `penstock user list`",
    "idp": "see `penstock idp list`",
    "session": "see `penstock session list`",
    "node": "see `penstock node list`",
    "dead-letters": "see `penstock dead-letters list`",
}
#: How the codes of errors about an unknown name end.
_UNKNOWN: Final = ("not_found", ".unknown_sku", ".unknown_runtime")
_OF_INVOCATIONS: Final = frozenset({"status", "result", "cancel", "retry"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What is told of a failure, and the exit code that it means."""

    exit_code: int
    code: str
    message: str
    field: str | None = None
    correlation_id: str | None = None
    next: str = ""


def failure(error: "CliError | SdkError", session: "Session") -> Failure:
    """The failure of a command line."""
    if isinstance(error, CliError):
        return Failure(
            exit_code=error.exit_code,
            code=error.code,
            message=error.message,
            field=error.field,
            next=_meant(session, error) + error.next_step,
        )
    return Failure(
        exit_code=exit_code(error),
        code=error.code,
        message=error.message,
        field=error.field,
        correlation_id=error.correlation_id,
        next=_meant(session, error) + _next(error, session.argv),
    )


def _meant(session: "Session", error: "CliError | SdkError") -> str:
    """The name that was probably meant, where one is unknown."""
    if session.context is None or not error.code.endswith(_UNKNOWN):
        return ""
    from penstock.cli.suggesting import nearest

    near = nearest(session.context, error.message)
    return f"did you mean {near}? " if near else ""


def _next(error: "SdkError", argv: Sequence[str]) -> str:
    from penstock.sdk.errors import NotFound, Unauthenticated

    if isinstance(error, Unauthenticated):
        return LOGIN_AGAIN
    if error.field == "Penstock-Project":
        return _LISTS["project"]
    if isinstance(error, NotFound):
        groups = [word for word in argv if word in _LISTS]
        if groups[:1] == ["fn"] and not _OF_INVOCATIONS.isdisjoint(argv):
            return "see `penstock fn invocations`"
        return _LISTS[groups[0]] if groups else ""
    return _BY_CODE.get(error.code, "")


def tell(session: "Session", argv: Sequence[str], told: Failure) -> int:
    """Print a failure as one line on standard error, and give its exit code."""
    details = {"code": told.code, "field": told.field, "correlation_id": told.correlation_id}
    known = {name: value for name, value in details.items() if value}
    if session.output.format is Format.JSON or _asks_for_json(argv):
        import json

        error = {"message": told.message, **({"next": told.next} if told.next else {}), **known}
        text = clean_json(json.dumps({"error": error}, ensure_ascii=False))
    else:
        message = f"{told.message}; {told.next}" if told.next else told.message
        text = clean(f"error: {message} ({', '.join(f'{name}={value}' for name, value in known.items())})")
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
    return told.exit_code


def _asks_for_json(argv: Sequence[str]) -> bool:
    """For failures before the options were read."""
    pairs = itertools.pairwise(argv)
    return any(pair in {("-o", "json"), ("--output", "json")} for pair in pairs) or "--output=json" in argv

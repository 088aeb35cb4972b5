"""Functions, their invocations and their dead letters."""

import re
import secrets
from typing import Any, Final

import msgspec

from penstock.sdk.errors import InvalidArgument
from penstock.sdk.outputs import Outputs
from penstock.sdk.protocol import Listing, Steps, call, excerpt
from penstock.sdk.resources import Resource, X, download, listing, operation, outputs
from penstock.sdk.transfers import Download, Progress, silent
from penstock.wire import rest
from penstock.wire.rest import Page
from penstock.wire.serverless import Mode

#: After these, nothing more happens to an invocation.
ENDED: Final = frozenset({"succeeded", "failed", "expired", "cancelled", "dead_lettered"})
DEAD_LETTERS: Final = "/serverless/dead-letters"

_NAME: Final = re.compile(r"[a-z0-9_-]{1,63}")
_INVOCATION: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


def function_name(text: str) -> str:
    """The name in its one form, if it can be a function's."""
    lowered = text.lower()
    if not _NAME.fullmatch(lowered):
        raise InvalidArgument(
            f"function must be 1 to 63 letters, digits, underscores and hyphens, not {excerpt(text)!r}",
            field="function",
        )
    return lowered


def invocation_id(text: str) -> str:
    """The id, if it can be an invocation's."""
    if not _INVOCATION.fullmatch(text):
        raise InvalidArgument(
            f"invocation must be 1 to 64 letters, digits, underscores and hyphens, not {excerpt(text)!r}",
            field="invocation",
        )
    return text


class Functions(Resource[X]):
    """Code that runs when it is called."""

    @operation
    def put(self, name: str, function: rest.FunctionPut) -> Steps[rest.Function]:
        """Deploy: a new version, unless this is what the current one is."""
        return call("PUT", _function(name), rest.Function, body=function)

    @operation
    def get(self, name: str) -> Steps[rest.Function]:
        """One function, with its workers and queue in numbers."""
        return call("GET", _function(name), rest.Function)

    @listing
    def list(self, *, limit: int | None = None) -> Listing[rest.Function]:
        """Those of the current project."""
        return Listing(path="/functions", answer=Page[rest.Function], limit=limit)

    @operation
    def delete(self, name: str) -> Steps[None]:
        """Delete it: what waits fails, what runs may finish."""
        return call("DELETE", _function(name), type(None))

    @listing
    def versions(self, name: str, *, limit: int | None = None) -> Listing[rest.FunctionVersion]:
        """What it was, newest first."""
        return Listing(path=f"{_function(name)}/versions", answer=Page[rest.FunctionVersion], limit=limit)

    @listing
    def workers(self, name: str, *, limit: int | None = None) -> Listing[rest.FunctionWorker]:
        """The units that serve it."""
        return Listing(path=f"{_function(name)}/workers", answer=Page[rest.FunctionWorker], limit=limit)

    @operation
    def rollback(self, name: str, *, version: int | None = None) -> Steps[rest.Function]:
        """Make an earlier version the current one; the one before, where no number is given."""
        body = rest.Rollback(version=version)
        return call("POST", f"{_function(name)}/rollback", rest.Function, body=body, create=True)

    @operation
    def map(
        self, name: str, payloads: "list[Any]", *, batch: str | None = None, content_type: str = "application/json"
    ) -> Steps[rest.MapCreated]:
        """Invoke it once for each payload, asynchronously. The same batch again changes nothing."""
        body = rest.MapCreate(payloads=payloads, id=batch or _new_id("map"), content_type=content_type)
        return call("POST", f"{_function(name)}/map", rest.MapCreated, body=body, create=True)

    @listing
    def logs(
        self, name: str, *, invocation: str | None = None, newest_first: bool = False, limit: int | None = None
    ) -> "Listing[rest.OutputLine]":
        """What its handlers said, oldest first if nothing else is asked for."""
        only = {
            "invocation": invocation_id(invocation) if invocation else None,
            "order": "desc" if newest_first else None,
        }
        return Listing(path=f"{_function(name)}/logs", answer=Page[rest.OutputLine], query=only, limit=limit)

    @outputs
    def follow(self, name: str, *, after: str | None = None) -> Outputs:
        """What its handlers say, live and without end."""
        return Outputs(f"{_function(name)}/logs", query={"follow": "true"}, after=after)

    @operation
    def invoke(
        self,
        name: str,
        payload: bytes,
        *,
        mode: str = "async",
        invocation: str | None = None,
        content_type: str = "application/json",
        delay_s: float = 0,
        ttl_s: float = 0,
        timeout_s: int = 0,
        webhook: str | None = None,
    ) -> "Steps[rest.InvocationAck]":
        """Accept an invocation and go on; `payload` is JSON. With the same id again there is still one."""
        body = rest.InvocationRequest(
            serverlessRequestID=function_name(name),
            invocationID=invocation or _new_id("inv"),
            mode=Mode(mode),
            contentType=content_type,
            payload=msgspec.Raw(payload),
            timeoutSeconds=timeout_s,
            delaySeconds=delay_s,
            ttlSeconds=ttl_s,
            webhook=webhook,
        )
        return _data(call("POST", "/serverless/invocations", rest.Data[rest.InvocationAck], body=body, create=True))


class Invocations(Resource[X]):
    """Calls of functions: waiting, running and over."""

    @listing
    def list(
        self, *, function: str | None = None, state: str | None = None, limit: int | None = None
    ) -> Listing[rest.Invocation]:
        """Those of the current project, newest first."""
        query = {"function": function_name(function) if function else None, "state": state}
        return Listing(path="/invocations", answer=Page[rest.Invocation], query=query, limit=limit)

    @operation
    def get(self, invocation: str, *, wait_s: int = 0) -> Steps[rest.Invocation]:
        """One invocation; `wait_s` > 0 waits that long for its end."""
        return call("GET", _invocation(invocation), rest.Invocation, query={"wait_s": wait_s or None})

    @download
    def result(self, invocation: str, *, on_size: Progress = silent) -> Download:
        """The bytes that it answered, whatever their number."""
        return Download(f"{_invocation(invocation)}/result", on_size=on_size)

    @operation
    def cancel(self, invocation: str) -> Steps[rest.Invocation]:
        """Stop it, in whatever phase it is. Cancelling twice is the same as once."""
        return call("POST", f"{_invocation(invocation)}/cancel", rest.Invocation, create=True)

    @operation
    def retry(self, invocation: str) -> Steps[rest.Invocation]:
        """The same again, as a new invocation; only after its end."""
        return call("POST", f"{_invocation(invocation)}/retry", rest.Invocation, create=True)

    @outputs
    def follow(self, invocation: str, *, after: str | None = None) -> Outputs:
        """What it says, from its beginning; the last item is the invocation itself."""
        return Outputs(f"{_invocation(invocation)}/events", after=after)


class FunctionDeadLetters(Resource[X]):
    """What functions could not do."""

    @listing
    def list(self, *, limit: int | None = None) -> Listing[rest.DeadLetter]:
        """Those of the current project, newest first."""
        return Listing(path=DEAD_LETTERS, answer=Page[rest.DeadLetter], limit=limit)

    @operation
    def replay(self, letter: str) -> Steps[rest.Invocation]:
        """Make a new invocation of it."""
        return call("POST", f"{DEAD_LETTERS}/{_letter(letter)}/replay", rest.Invocation, create=True)

    @operation
    def discard(self, letter: str) -> Steps[None]:
        """Give it up."""
        return call("DELETE", f"{DEAD_LETTERS}/{_letter(letter)}", type(None))


def _data(steps: "Steps[rest.Data[rest.InvocationAck]]") -> Steps[rest.InvocationAck]:
    answer = yield from steps
    return answer.data


def _new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(16)}"


def _function(name: str) -> str:
    return f"/functions/{function_name(name)}"


def _invocation(text: str) -> str:
    return f"/invocations/{invocation_id(text)}"


def _letter(text: str) -> str:
    if not _INVOCATION.fullmatch(text):
        raise InvalidArgument(f"that is no dead letter's id: {excerpt(text)!r}", field="id")
    return text

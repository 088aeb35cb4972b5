"""Invocations as they will be kept: what was asked for is checked, a payload that is too large for a row put apart."""

import hashlib
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from penstock.kit.caller import Caller
from penstock.kit.errors import Invalid
from penstock.kit.telemetry import correlation_id
from penstock.serverless.model import Draft, Function, Mode
from penstock.serverless.ports import Bytes
from penstock.serverless.service import validate
from penstock.wire.rest import InvocationRequest
from penstock.wire.serverless import HEADER_BYTES_MAX, INLINE_BYTES_MAX, PAYLOAD_BYTES_MAX, Reference

#: Of the names and values of an invocation's attributes together.
ATTRIBUTE_BYTES_MAX: Final = 16 << 10
#: Kept for whoever asks how it went, for so long at most while it waits.
_TTL_S: Final = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What somebody asks of a function; without an id it gets one."""

    payload: bytes
    id: str | None = None
    content_type: str = "application/json"
    mode: Mode = Mode.ASYNC
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    attributes: Mapping[str, str] = field(default_factory=dict[str, str])
    timeout_s: float | None = None
    delay_s: float = 0.0
    ttl_s: float | None = None
    webhook: str | None = None
    reply_to: str = ""
    parent_id: str | None = None


def asked_by(request: InvocationRequest) -> Asked:
    """What the source's route asks for, or Invalid naming the field."""
    check_headers(request.headers)
    check_attributes(request.attributes)
    check_text("contentType", request.contentType)
    return Asked(
        payload=bytes(request.payload),
        id=request.invocationID,
        content_type=request.contentType,
        mode=request.mode,
        headers=request.headers,
        attributes=request.attributes,
        timeout_s=request.timeoutSeconds or None,
        delay_s=request.delaySeconds,
        ttl_s=request.ttlSeconds or None,
        webhook=request.webhook,
    )


def nobodys(caller: Caller, name: str) -> Function:
    """In the place of a function that there is not."""
    return Function(
        id="",
        project_id=caller.project_id,
        organisation_id=caller.organisation_id,
        name=name,
        current_version=0,
        serving_version=0,
        timeout_s=0,
    )


async def draft(bytes_: Bytes, caller: Caller, function: Function, asked: Asked) -> Draft:
    """The invocation. A large payload is stored before it."""
    invocation_id = asked.id or new_invocation_id()
    digest = hashlib.sha256(asked.payload).digest()
    reference = await _store(bytes_, caller.project_id, invocation_id, asked.payload, digest)
    return Draft(
        project_id=caller.project_id,
        id=invocation_id,
        function_id=function.id or None,
        function_name=function.name,
        mode=asked.mode,
        content_type=asked.content_type,
        headers=asked.headers,
        attributes=asked.attributes,
        payload=None if reference else asked.payload,
        payload_ref=reference,
        payload_hash=digest,
        timeout_s=asked.timeout_s,
        delay_s=asked.delay_s,
        ttl_s=asked.ttl_s or _TTL_S,
        reply_to=asked.reply_to,
        webhook=asked.webhook or function.webhook,
        parent_id=asked.parent_id,
        key_id=caller.key_id,
        created_by=caller.principal_id,
        correlation_id=correlation_id(),
    )


async def _store(
    bytes_: Bytes, project_id: str, invocation_id: str, payload: bytes, digest: bytes
) -> dict[str, Any] | None:
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise Invalid(f"payload: max {PAYLOAD_BYTES_MAX} bytes", field="payload")
    if len(payload) <= INLINE_BYTES_MAX:
        return None
    key = f"invocations/{invocation_id}/payload-{digest.hex()[:16]}"
    kept: Reference = await bytes_.keep(project_id, key, _once(payload), bytes_max=PAYLOAD_BYTES_MAX)
    return msgspec.to_builtins(kept)


def new_invocation_id() -> str:
    """As the source makes them."""
    return f"inv-{secrets.token_hex(16)}"


def function_name(text: str, project_id: str) -> str:
    """A name as it counts, or Invalid."""
    return validate.name(project_id, text, field="serverlessRequestID")


def check_headers(headers: Mapping[str, str]) -> None:
    """Headers that can be passed on."""
    if sum(len(name) + len(value) for name, value in headers.items()) > HEADER_BYTES_MAX:
        raise Invalid(f"headers: max {HEADER_BYTES_MAX} bytes in all", field="headers")
    for name, value in headers.items():
        if not name or not name.isascii() or any(ord(letter) < 32 for letter in name + value):
            raise Invalid("headers: names and values must not have control characters", field="headers")


def check_attributes(attributes: Mapping[str, str]) -> None:
    """Attributes that fit into a message, and that can be kept."""
    if sum(len(name.encode()) + len(value.encode()) for name, value in attributes.items()) > ATTRIBUTE_BYTES_MAX:
        raise Invalid(f"attributes: max {ATTRIBUTE_BYTES_MAX} bytes in all", field="attributes")
    if any("\0" in name + value for name, value in attributes.items()):
        raise Invalid("attributes: names and values must not have zero bytes", field="attributes")


def check_text(field: str, text: str) -> None:
    """One line, as in a header."""
    if not text.isprintable():
        raise Invalid(f"{field} must not have control characters", field=field)


async def _once(payload: bytes) -> AsyncIterator[bytes]:
    yield payload

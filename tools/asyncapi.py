"""The AsyncAPI document: facts on `evt.>`, and the messages of functions on `runtime.serverless.>`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from penstock.wire import serverless, subjects
from penstock.wire.catalogue import CATALOGUE
from penstock.wire.events import Envelope

_SCHEMAS: Final = "#/components/schemas/{name}"
_DESCRIPTION: Final = (
    "Facts (`evt.>`, stream EVENTS) come in order per aggregate, at least once: tell repeats by `event_id` and order by"
    " `version`. The same envelopes come from GET /api/v1/events/stream. Messages of functions"
    " (`runtime.serverless.>`, streams WORK, OUT and CALLS) are hints, because the rows in Postgres decide: a result"
    " counts by its attempt's token, a dispatch by its MAC under the worker's key."
)
_PARAMETERS: Final = {
    "request": "The function's name in the default project, `<projectID>_<name>` elsewhere.",
    "worker": "The worker's name.",
    "source": "`invocation`, `dispatch`, `result` or `metric`.",
}
_SERVERS: Final = {
    "control": {
        "host": "127.0.0.1:4222",
        "protocol": "nats",
        "description": "NATS of the install, for its own processes and operators. `penstock up` chooses the port.",
    },
    "workers": {
        "host": "127.0.0.1:8444",
        "protocol": "wss",
        "description": "The same NATS for sidecars of other hosts (`penstock up --address`), with TLS.",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """One kind of message of functions: its subject, and which process sends it to which."""

    name: str
    address: str
    message: type[msgspec.Struct]
    sender: str
    receiver: str


RUNTIME: Final = (
    Runtime(
        name="invoke",
        address=subjects.invoke("{request}"),
        message=serverless.InvocationMessage,
        sender="gateway, api",
        receiver="activator",
    ),
    Runtime(
        name="dispatch",
        address=subjects.dispatch("{request}", "{worker}"),
        message=serverless.WorkerDispatchMessage,
        sender="activator",
        receiver="sidecar",
    ),
    Runtime(
        name="result",
        address=subjects.result("{request}"),
        message=serverless.InvocationResultMessage,
        sender="sidecar, activator",
        receiver="activator",
    ),
    Runtime(
        name="metrics",
        address=subjects.metrics("{request}"),
        message=serverless.WorkerMetricMessage,
        sender="sidecar",
        receiver="activator",
    ),
    Runtime(
        name="output",
        address=subjects.output("{request}"),
        message=serverless.OutputMessage,
        sender="sidecar",
        receiver="activator",
    ),
    Runtime(
        name="call",
        address=subjects.call("{request}", "{worker}"),
        message=serverless.CallMessage,
        sender="sidecar",
        receiver="activator",
    ),
    Runtime(
        name="answer",
        address=subjects.call_answer("{request}", "{worker}"),
        message=serverless.CallAnswer,
        sender="activator",
        receiver="sidecar",
    ),
    Runtime(
        name="control",
        address=subjects.control("{request}", "{worker}"),
        message=serverless.ControlMessage,
        sender="activator, api, gateway",
        receiver="sidecar",
    ),
    Runtime(
        name="dlq",
        address=subjects.dead_letter("{source}", "{request}"),
        message=serverless.DeadLetterMessage,
        sender="activator",
        receiver="operators",
    ),
)


def document(version: str) -> dict[str, Any]:
    """All channels, one message each."""
    facts = {kind: _fact(kind, payload) for kind, payload in CATALOGUE.items()}
    runtime = {each.message.__name__: _runtime_message(each) for each in RUNTIME}
    payloads = {*CATALOGUE.values(), *(_readable(each.message) for each in RUNTIME)}
    ordered = sorted(payloads, key=lambda cls: cls.__name__)
    _, schemas = msgspec.json.schema_components([Envelope, *ordered], ref_template=_SCHEMAS)
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Penstock messages", "version": version, "description": _DESCRIPTION},
        "servers": _SERVERS,
        "channels": {
            **{kind: _channel(subjects.event(kind), kind) for kind in CATALOGUE},
            **{each.name: _channel(each.address, each.message.__name__) for each in RUNTIME},
        },
        "operations": {
            **{kind: _operation(kind, f"The relay publishes {kind}.") for kind in CATALOGUE},
            **{each.name: _operation(each.name, f"From {each.sender} to {each.receiver}.") for each in RUNTIME},
        },
        "components": {"schemas": schemas, "messages": facts | runtime},
    }


def _readable(message: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The same struct with `Any` for bytes that are passed on unread: msgspec cannot describe their default."""
    fields = [(field.encode_name, *_typed(field)) for field in msgspec.structs.fields(message)]
    return msgspec.defstruct(message.__name__, fields, kw_only=True, namespace={"__doc__": message.__doc__})


def _typed(field: msgspec.structs.FieldInfo) -> tuple[Any, ...]:
    if field.type is msgspec.Raw:
        return (Any,) if field.required else (Any, None)
    if field.default is not msgspec.NODEFAULT:
        return (field.type, field.default)
    if field.default_factory is not msgspec.NODEFAULT:
        return (field.type, msgspec.field(default_factory=field.default_factory))
    return (field.type,)


def _channel(address: str, message: str) -> dict[str, Any]:
    found = {name: text for name, text in _PARAMETERS.items() if f"{{{name}}}" in address}
    channel: dict[str, Any] = {
        "address": address,
        "messages": {message: {"$ref": f"#/components/messages/{message}"}},
    }
    return channel | ({"parameters": _parameters(found)} if found else {})


def _parameters(found: Mapping[str, str]) -> dict[str, Any]:
    return {name: {"description": text} for name, text in found.items()}


def _operation(channel: str, summary: str) -> dict[str, Any]:
    return {"action": "send", "channel": {"$ref": f"#/channels/{channel}"}, "summary": summary}


def _fact(kind: str, payload: type[msgspec.Struct]) -> dict[str, Any]:
    narrowed = {
        "properties": {
            "event_type": {"const": kind},
            "payload": {"$ref": _SCHEMAS.format(name=payload.__name__)},
        }
    }
    return {
        "name": kind,
        "contentType": "application/json",
        "payload": {"allOf": [{"$ref": _SCHEMAS.format(name="Envelope")}, narrowed]},
    }


def _runtime_message(each: Runtime) -> dict[str, Any]:
    return {
        "name": each.message.__name__,
        "contentType": "application/json",
        "payload": {"$ref": _SCHEMAS.format(name=each.message.__name__)},
    }

"""Calls of functions at the gateway, as the API's document shows them."""

from typing import Any, Final

from penstock.wire.serverless import TIMEOUT_S_MAX, Mode

_ID: Final = {
    "name": "Penstock-Invocation-Id",
    "in": "header",
    "required": False,
    "description": "An id of the caller's own, with one effect; `Idempotency-Key` means the same.",
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
}
_PARAMETERS: Final = [
    {
        "name": "function",
        "in": "path",
        "required": True,
        "description": "The function's name.",
        "schema": {"type": "string"},
    },
    {
        "name": "mode",
        "in": "query",
        "required": False,
        "description": "`sync` waits for the answer, `async` is answered with 202, `stream` with server-sent events.",
        "schema": {"type": "string", "enum": list(Mode), "default": Mode.SYNC},
    },
    {
        "name": "Penstock-Timeout",
        "in": "header",
        "required": False,
        "description": "Seconds that the invocation may take.",
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": TIMEOUT_S_MAX},
    },
    _ID,
]
_HEADERS: Final = {
    "Penstock-Invocation-Id": {"description": "The invocation's id.", "schema": {"type": "string"}},
    "Penstock-State": {"description": "The invocation's state.", "schema": {"type": "string"}},
}
_FAILED: Final = {
    "description": "Refused before the function ran, or its failure: `error.code` is the failure class.",
    "headers": _HEADERS,
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}},
}


def paths(gateway_url: str) -> dict[str, dict[str, Any]]:
    """The path item of calls."""
    return {"/f/{function}": {"servers": [{"url": gateway_url, "description": "The gateway"}], "post": _CALL}}


_CALL: Final = {
    "operationId": "callFunction",
    "tags": ["functions"],
    "summary": "Call a function",
    "description": "Call a function. The body is its payload, as JSON; further path segments, the query and headers"
    " `X-…` reach the handler. The answer is the handler's own: its status, Content-Type and body.",
    "parameters": _PARAMETERS,
    "requestBody": {"required": False, "content": {"application/json": {"schema": {}}}},
    "responses": {
        "200": {
            "description": "The handler's own answer, with the status that it chose.",
            "headers": _HEADERS,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        },
        "202": {
            "description": "Accepted, or not ended in time.",
            "headers": _HEADERS,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/InvocationAck"}}},
        },
        "default": _FAILED,
    },
}

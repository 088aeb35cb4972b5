"""Units at the gateway, as the API's document shows them."""

from typing import Any, Final

_ALLOCATION: Final = {
    "name": "allocation_id",
    "in": "path",
    "required": True,
    "description": "An active allocation of the project.",
    "schema": {"type": "string"},
}
_PORT: Final = {
    "name": "port",
    "in": "path",
    "required": True,
    "description": "One of the allocation's ports.",
    "schema": {"type": "integer", "minimum": 1, "maximum": 65535},
}
_PATH: Final = {
    "name": "path",
    "in": "path",
    "required": True,
    "description": "Path for the unit's server, with its query. It may have slashes.",
    "schema": {"type": "string"},
}
_REFUSED: Final = {
    "description": "Refused or failed before the unit answered; `error.code` is stable.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}},
}
_METHODS: Final = ("get", "put", "post", "patch", "delete")


def paths(gateway_url: str) -> dict[str, dict[str, Any]]:
    """Path items of unit ports and commands."""
    servers = [{"url": gateway_url, "description": "The gateway"}]
    ports = {method: _port_operation(method) for method in _METHODS}
    return {
        "/u/{allocation_id}/{port}/{path}": {"servers": servers, **ports},
        "/ws/exec/{allocation_id}": {"servers": servers, "get": _EXECUTE},
    }


def _port_operation(method: str) -> dict[str, Any]:
    return {
        "operationId": f"{method}UnitPort",
        "tags": ["units"],
        "summary": "Reach a port of a unit",
        "description": "Reach a port of a unit. The request goes to the unit's own server, and its answer comes back as"
        " it is. Any other method and WebSockets pass too. Browsers may send the key as the password of Basic.",
        "parameters": [_ALLOCATION, _PORT, _PATH],
        "responses": {
            "200": {
                "description": "The unit's own answer, with any status.",
                "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
            },
            "default": _REFUSED,
        },
    }


_EXECUTE: Final = {
    "operationId": "executeInUnit",
    "tags": ["units"],
    "summary": "Run a command in a unit",
    "description": "Run a command in a unit, over a WebSocket: the subprotocol and its messages are those of"
    " `penstock alloc exec`.",
    "parameters": [_ALLOCATION],
    "responses": {"101": {"description": "The WebSocket is open."}, "default": _REFUSED},
}

"""The OpenAPI document of the running routes, completed with what every operation shares.

It is served at /api/openapi.json and committed as docs/api/openapi.json; a check fails when the two differ.
"""

import re
from collections.abc import Iterable
from typing import Any, Final, cast

import msgspec
from litestar import Litestar, Request, Router
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme
from litestar.routes import BaseRoute
from litestar.types import ControllerRouterHandler

from penstock.wire import rest

_GENERIC: Final = re.compile(rb"(Page|Data)_penstock\.wire\.rest\.\w+\.(\w+?)_")
_METHODS: Final = frozenset({"get", "put", "post", "patch", "delete"})
_FAILURE: Final = {
    "description": "Refused or failed; `error.code` is stable.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}},
}


class _JsonOnly(Router):
    """Without the page that Litestar adds for unknown paths: those answer like everywhere else."""

    def register(self, value: ControllerRouterHandler) -> list[BaseRoute]:
        if "/{path:str}" in getattr(value, "paths", ()):
            return []
        return super().register(value)


class _Json(JsonRenderPlugin):
    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        del openapi_schema
        return msgspec.json.encode(document(request.app))


def config(*, title: str, version: str, description: str) -> OpenAPIConfig:
    """Serve the document as JSON, and no other site."""
    scheme = SecurityScheme(type="http", scheme="bearer", description="An API key (psk_…), a session (pss_…) or a JWT")
    return OpenAPIConfig(
        title=title,
        version=version,
        description=description,
        components=Components(security_schemes={"api_key": scheme}),
        security=[{"api_key": []}],
        use_handler_docstrings=True,
        openapi_router=_JsonOnly(path="/api", route_handlers=[], opt={"public": True}, include_in_schema=False),
        render_plugins=[_Json(path="/openapi.json")],
    )


def document(app: Litestar) -> dict[str, Any]:
    """The whole document: Litestar's paths, msgspec's schemas, the one error envelope on every operation."""
    raw = _GENERIC.sub(rb"\1Of\2", msgspec.json.encode(app.openapi_schema.to_schema()))
    built: dict[str, Any] = msgspec.json.decode(raw)
    public = _public_operations(app)
    for path in built["paths"].values():
        for method, operation in path.items():
            if method in _METHODS:
                _complete(operation, public=operation["operationId"] in public)
    built["components"]["schemas"] |= _schemas(built["components"].get("schemas", {}))
    return cast("dict[str, Any]", sort(built))


def _schemas(names: Iterable[str]) -> dict[str, Any]:
    """What msgspec checks is what the document says: limits, defaults, and that unknown fields are refused."""
    bodies = [cls for name in sorted(names) if isinstance(cls := getattr(rest, name, None), type)]
    _, schemas = msgspec.json.schema_components([rest.ErrorBody, *bodies], ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        schema["description"] = " ".join(schema.get("description", "").split())
    return schemas


def _public_operations(app: Litestar) -> set[str]:
    return {
        str(handler.operation_id)
        for route in app.routes
        for handler in getattr(route, "route_handlers", ())
        if handler.opt.get("public")
    }


def _complete(operation: dict[str, Any], *, public: bool) -> None:
    """Litestar documents its own shape of 400; ours is one for all statuses."""
    description = operation.setdefault("description", "")
    operation["summary"] = description.partition(". ")[0].rstrip(".")
    operation["responses"].pop("400", None)
    for answer in operation["responses"].values():
        answer["description"] = "Done."
    operation["responses"]["default"] = _FAILURE
    if public:
        operation["security"] = []


def sort(value: object) -> object:
    """The same content in one order, so that documents can be compared byte by byte."""
    if isinstance(value, dict):
        mapping = cast("dict[str, object]", value)
        return {key: sort(mapping[key]) for key in sorted(mapping)}
    if isinstance(value, list):
        return [sort(inner) for inner in cast("list[object]", value)]
    return value

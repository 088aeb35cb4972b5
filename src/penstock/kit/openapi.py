"""The OpenAPI document: the running routes, completed with what every operation shares, and those of other listeners.

It is served at /api/openapi.json, as a page at /docs, and committed as docs/api/openapi.json; a check fails when that
differs from the code.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, cast

import msgspec
from litestar import Litestar, MediaType, Request, Response, Router, get
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme
from litestar.routes import BaseRoute
from litestar.types import ControllerRouterHandler

from penstock.kit import reference
from penstock.wire import rest

#: Path → path item, as OpenAPI has them.
Paths = Mapping[str, Mapping[str, Any]]

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
    def __init__(self, elsewhere: Paths) -> None:
        super().__init__(path="/openapi.json")
        self._elsewhere = elsewhere
        self._made: bytes | None = None

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        """The document, made when it is first asked for."""
        del openapi_schema
        if self._made is None:
            self._made = msgspec.json.encode(document(request.app, self._elsewhere))
        return self._made


def page(elsewhere: Paths) -> HTTPRouteHandler:
    """`GET /docs`: the document as a page that needs no other host, made when it is first asked for."""
    made: list[str] = []

    @get("/docs", opt={"public": True}, include_in_schema=False)
    async def show_reference(request: Request[Any, Any, Any]) -> Response[str]:
        if not made:
            made.append(reference.page(document(request.app, elsewhere)))
        return Response(content=made[0], media_type=MediaType.HTML, headers=reference.HEADERS)

    return show_reference


def config(*, title: str, version: str, description: str, elsewhere: Paths) -> OpenAPIConfig:
    """Serve the document as JSON. `elsewhere` are the paths of other listeners."""
    scheme = SecurityScheme(type="http", scheme="bearer", description="An API key (psk_…), a session (pss_…) or a JWT")
    return OpenAPIConfig(
        title=title,
        version=version,
        description=description,
        components=Components(security_schemes={"api_key": scheme}),
        security=[{"api_key": []}],
        use_handler_docstrings=True,
        openapi_router=_JsonOnly(path="/api", route_handlers=[], opt={"public": True}, include_in_schema=False),
        render_plugins=[_Json(elsewhere)],
    )


def document(app: Litestar, elsewhere: Paths) -> dict[str, Any]:
    """The whole document: Litestar's paths, msgspec's schemas, the one error envelope on every operation, and the paths
    of other listeners as they are."""
    raw = _GENERIC.sub(rb"\1Of\2", msgspec.json.encode(app.openapi_schema.to_schema()))
    built: dict[str, Any] = msgspec.json.decode(raw)
    public = _public_operations(app)
    for path in built["paths"].values():
        for method, operation in path.items():
            if method in _METHODS:
                _complete(operation, public=operation["operationId"] in public)
    built["paths"] |= elsewhere
    schemas = built["components"]["schemas"]
    schemas |= _schemas({*schemas, *_referred(elsewhere)})
    return cast("dict[str, Any]", sort(built))


def _referred(paths: Paths) -> Iterator[str]:
    """Names of the schemas that the paths refer to."""
    pending: list[object] = [paths]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            mapping = cast("Mapping[str, object]", value)
            if isinstance(target := mapping.get("$ref"), str):
                yield target.rpartition("/")[2]
            pending += mapping.values()
        elif isinstance(value, list):
            pending += cast("list[object]", value)


def _schemas(names: Iterable[str]) -> dict[str, Any]:
    """What msgspec checks is what the document says: limits, defaults, and that unknown fields are refused."""
    bodies = [cls for name in sorted(names) if isinstance(cls := getattr(rest, name, None), type)]
    _, schemas = msgspec.json.schema_components([rest.ErrorBody, *bodies], ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        schema["description"] = " ".join(schema.get("description", "").split())
        for field in schema.get("properties", {}).values():
            _describe_items(field)
    return schemas


def _describe_items(field: dict[str, Any]) -> None:
    """A list of anything says so: generators refuse an array without `items`."""
    if field.get("type") == "array":
        field.setdefault("items", {})


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
    for parameter in operation.get("parameters", ()):
        parameter["schema"] = _without_null(parameter["schema"])
    if public:
        operation["security"] = []


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter that may be absent is never null: the URL has no such value."""
    kinds = [kind for kind in schema.get("oneOf", ()) if kind != {"type": "null"}]
    if len(kinds) != 1:
        return schema
    return {name: value for name, value in schema.items() if name != "oneOf"} | kinds[0]


def sort(value: object) -> object:
    """The same content in one order, so that documents can be compared byte by byte."""
    if isinstance(value, dict):
        mapping = cast("dict[str, object]", value)
        return {key: sort(mapping[key]) for key in sorted(mapping)}
    if isinstance(value, list):
        return [sort(inner) for inner in cast("list[object]", value)]
    return value

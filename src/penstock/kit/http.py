"""The HTTP edge of the api: what every route shares.

Routes get `caller`, `once` and `page` injected by name. Admission is a hook on the whole application that no route can
replace, and it comes before the body is read: the query's names, who the caller is (the few public routes say
`opt={"public": True}` and take small bodies), and whether their role allows what the route is for
(`opt={"action": "…"}`, which every route with a body has; `"denial"` is the error's class where it is a domain's own).
Every failure leaves in one envelope.
"""

import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Protocol, TypeAlias, cast

import asyncpg
import msgspec
import structlog
from litestar import Litestar, MediaType, Request, Response
from litestar.config.cors import CORSConfig
from litestar.di import Provide
from litestar.exceptions import HTTPException, ValidationException
from litestar.exceptions.base_exceptions import LitestarDeprecationWarning
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.config import OpenAPIConfig
from litestar.params import HeaderParameter, QueryParameter
from litestar.types import ControllerRouterHandler, ExceptionHandlersMap

from penstock.kit import jsonbody
from penstock.kit.caller import Caller
from penstock.kit.edge import PUBLIC_BODY_BYTES_MAX, EdgeRequest, Head, Rejected
from penstock.kit.errors import Denied, Invalid, Kind, PenstockError, StorageFull, Unavailable, missing
from penstock.kit.full import FULL, is_full
from penstock.kit.idempotency import Once
from penstock.kit.ids import is_id
from penstock.kit.paging import LIMIT_DEFAULT, LIMIT_MAX, PageQuery
from penstock.kit.queries import unknown_parameter
from penstock.kit.statuses import STATUS
from penstock.kit.telemetry import correlation_id, logger
from penstock.wire.rest import ErrorBody, ErrorDetail

Hook: TypeAlias = Callable[[Request[Any, Any, Any]], Awaitable[None]]

_RETRY_AFTER_S: Final = 5
#: Where a handler's options hold the names of its query parameters.
_QUERY: Final = "query"
_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})

_log = logger(__name__)
_encoder = msgspec.json.Encoder()

_CODES: Final = {
    400: "invalid_request",
    401: "unauthenticated",
    403: "permission_denied",
    404: "not_found",
    405: "method_not_allowed",
    406: "not_acceptable",
    413: "payload_too_large",
    415: "unsupported_media_type",
    429: "exhausted",
}
#: What ids of each prefix stand for, in messages.
_KINDS: Final = {
    "alc": "allocation",
    "bdg": "budget",
    "dlt": "dead letter",
    "dlv": "delivery",
    "evt": "event",
    "key": "key",
    "map": "mapping",
    "nod": "node",
    "pay": "payment",
    "prj": "project",
    "rfd": "refund",
    "rsl": "resolution",
    "ses": "session",
    "slt": "slot",
    "sva": "service account",
    "usr": "user",
    "whk": "webhook",
}
#: Postgres cannot answer now, or chose this transaction as a victim: trying again may help.
_DATABASE_AWAY: Final = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.PostgresSystemError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    ConnectionError,
    TimeoutError,
)


class Authenticates(Protocol):
    """Tells who a request comes from."""

    async def authenticate(self, authorization: str | None, project: str | None) -> Caller:
        """The caller, or Unauthenticated. `project` is what the Penstock-Project header asks for."""
        ...


def created(body: bytes) -> Response[Any]:
    """201 with a body that is already encoded."""
    return Response(content=body, status_code=201, media_type=MediaType.JSON)


def path_id(prefix: str, text: str) -> str:
    """The id, or NotFound: nothing can have an id of another shape."""
    if not is_id(prefix, text):
        raise missing(_KINDS[prefix], text)
    return text


def provide_caller(request: Request[Any, Any, Any]) -> Caller:
    """Who makes this request; authentication put it there."""
    return cast("dict[str, Any]", request.scope)["caller"]


def provide_credential(request: Request[Any, Any, Any]) -> str:
    """What the caller proved their identity with; for sealing secrets that only they may read again."""
    head: Head = cast("dict[str, Any]", request.scope)["edge"]
    return head.authorization or ""


async def provide_once(
    request: Request[Any, Any, Any],
    idempotency_key: Annotated[
        str | None,
        HeaderParameter(
            name="Idempotency-Key",
            required=False,
            description="Up to 255 printable ASCII characters. The same key and body have one effect and one answer.",
        ),
    ] = None,
) -> Once | None:
    """The request's Idempotency-Key, bound to who sent it, the route and the body."""
    if idempotency_key is None:
        return None
    scope = cast("dict[str, Any]", request.scope)
    caller: Caller | None = scope.get("caller")
    return Once.of(
        scope=f"{caller.project_id}/{caller.principal_id}" if caller else "public",
        key=idempotency_key,
        operation=f"{scope['method']} {scope['path']}",
        body=await request.body(),
    )


def provide_page(
    limit: Annotated[int, QueryParameter(ge=1, le=LIMIT_MAX, description="How many at most.")] = LIMIT_DEFAULT,
    cursor: Annotated[
        str | None, QueryParameter(required=False, description="`next_cursor` of the page before.")
    ] = None,
) -> PageQuery:
    """The page asked for."""
    return PageQuery(limit=limit, cursor=cursor)


DEPENDENCIES: Final = {
    "caller": Provide(provide_caller, sync_to_thread=False),
    "credential": Provide(provide_credential, sync_to_thread=False),
    "once": Provide(provide_once),
    "page": Provide(provide_page, sync_to_thread=False),
}


def application(
    routes: Sequence[ControllerRouterHandler],
    authenticator: Authenticates,
    *,
    openapi: OpenAPIConfig | None = None,
    allowed_origins: Sequence[str] = (),
) -> Litestar:
    """The Litestar application: guarded by default, one error envelope. Serve it behind `edge.Edge`."""
    with warnings.catch_warnings():
        # Dependencies and bodies are injected by name here, by convention; Litestar 3 will want markers on them.
        warnings.simplefilter("ignore", LitestarDeprecationWarning)
        return _application(routes, authenticator, openapi, allowed_origins)


def _application(
    routes: Sequence[ControllerRouterHandler],
    authenticator: Authenticates,
    openapi: OpenAPIConfig | None,
    allowed_origins: Sequence[str],
) -> Litestar:
    admission = _admission(authenticator)
    app = Litestar(
        route_handlers=routes,
        before_request=admission,
        dependencies=DEPENDENCIES,
        exception_handlers=EXCEPTION_HANDLERS,
        request_class=EdgeRequest,
        openapi_config=openapi,
        cors_config=_cors(allowed_origins),
        logging_config=None,
        debug=False,
        signature_types=[Caller, Once, PageQuery],
    )
    _require_admission(app, admission)
    return app


def _cors(allowed_origins: Sequence[str]) -> CORSConfig | None:
    if not allowed_origins:
        return None
    return CORSConfig(
        allow_origins=list(allowed_origins),
        allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
        allow_headers=["Authorization", "Content-Type", "Idempotency-Key", "Penstock-Project", "X-Correlation-Id"],
        expose_headers=["X-Correlation-Id", "Retry-After"],
    )


def _admission(authenticator: Authenticates) -> Hook:
    async def admit(request: Request[Any, Any, Any]) -> None:
        handler = request.route_handler
        scope = cast("dict[str, Any]", request.scope)
        if scope["query_string"]:
            _check_query(request, handler.opt[_QUERY])
        head: Head = scope["edge"]
        if handler.opt.get("public"):
            head.limit_body(handler.opt.get("body_bytes_max", PUBLIC_BODY_BYTES_MAX))
            return
        caller = await authenticator.authenticate(head.authorization, head.project)
        scope["caller"] = caller
        structlog.contextvars.bind_contextvars(project_id=caller.project_id)
        if (action := handler.opt.get("action")) is not None:
            caller.require(action, denial=handler.opt.get("denial", Denied))

    return admit


def _check_query(request: Request[Any, Any, Any], known: frozenset[str]) -> None:
    for name in request.query_params:
        if name not in known:
            raise unknown_parameter(name)


def _require_admission(app: Litestar, admission: Hook) -> None:
    """Refuse to start with a route that skips admission, or that reads a body for whoever asks. A guard would be the
    usual place, but Litestar copies the handler for each call of a guard, which is a tenth of a small request."""
    for route in app.routes:
        for handler, parameters in getattr(route, "route_handler_map", {}).values():
            hook = handler.resolve_before_request()
            if getattr(hook, "func", hook) is not admission:
                raise RuntimeError(f"{handler} on {route.path} replaces the hook that authenticates")
            if not handler.opt.keys() & {"public", "action"} and _reads_body(handler):
                raise RuntimeError(f"{handler} on {route.path} reads a body and names no action")
            handler.opt[_QUERY] = frozenset(each.field_alias for each in parameters.expected_query_params)


def _reads_body(handler: HTTPRouteHandler) -> bool:
    parameters = handler.parsed_fn_signature.parameters.keys()
    return bool(parameters & {"data", "once", "request", "body"} and handler.http_methods & _WITH_BODY)


def envelope(
    status: int,
    code: str,
    message: str,
    *,
    field: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response[bytes]:
    """The one shape of every failure."""
    detail = ErrorDetail(code=code, message=message, field=field, correlation_id=correlation_id())
    return Response(
        content=_encoder.encode(ErrorBody(error=detail)),
        status_code=status,
        media_type=MediaType.JSON,
        headers=dict(headers or {}),
    )


def _on_expected(request: Request[Any, Any, Any], error: PenstockError) -> Response[bytes]:
    headers: dict[str, str] = {}
    if error.kind is Kind.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
        head: Head = cast("dict[str, Any]", request.scope)["edge"]
        _log.info("unauthenticated", client=head.client, detail=error.detail)
    retry_after_s = error.retry_after_s
    if retry_after_s is None and error.kind in (Kind.EXHAUSTED, Kind.UNAVAILABLE):
        retry_after_s = _RETRY_AFTER_S
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    if error.context:
        _log.info("refused", code=error.code, detail=error.detail, **error.context)
    return envelope(STATUS[error.kind], error.code, error.detail, field=error.field, headers=headers)


def _on_rejected(_: Request[Any, Any, Any], error: Rejected) -> Response[bytes]:
    headers = {"Connection": "close"} if error.close else {}
    return envelope(error.status, error.code, error.message, headers=headers)


def _on_validation(request: Request[Any, Any, Any], error: ValidationException) -> Response[bytes]:
    """Query, path and header parameters that Litestar refused."""
    extra = error.extra[0] if isinstance(error.extra, list) and error.extra else {}
    message = str(extra.get("message", "the request is not valid"))
    return _on_expected(request, jsonbody.invalid(message, at=str(extra.get("key", ""))))


def _on_http(_: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    status = error.status_code
    message = {404: "no such route", 405: "this route does not take this method"}.get(status, error.detail)
    if status >= 500:
        return _on_bug(_, error)
    return envelope(status, _CODES.get(status, "invalid_request"), message, headers=error.headers)


def _on_database_away(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    _log.warning("database_away", error=repr(error))
    return _on_expected(request, Unavailable("the database cannot answer now; try again", retry_after_s=1))


def _on_os_error(request: Request[Any, Any, Any], error: OSError) -> Response[bytes]:
    """A file that could not be written for want of space is no bug."""
    if not is_full(error):
        return _on_bug(request, error)
    FULL.labels("files").inc()
    return _on_expected(request, StorageFull("there is no space left on the server; try again later"))


def _on_refused_value(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """A value that nobody checked came as far as the database: a gap of ours, but the sender can correct it."""
    _log.error("value_unchecked", exc_info=error)
    return _on_expected(request, Invalid("a value in the request is out of range"))


def _on_bug(_: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    _log.error("request_failed", exc_info=error)
    return envelope(500, "internal", "something went wrong on our side; quote the correlation id")


EXCEPTION_HANDLERS: Final = cast(
    "ExceptionHandlersMap",
    {
        PenstockError: _on_expected,
        Rejected: _on_rejected,
        ValidationException: _on_validation,
        HTTPException: _on_http,
        asyncpg.DataError: _on_refused_value,
        OSError: _on_os_error,
        Exception: _on_bug,
        **dict.fromkeys(_DATABASE_AWAY, _on_database_away),
    },
)

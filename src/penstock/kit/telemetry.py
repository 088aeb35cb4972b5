"""Logs, traces and metrics, the same in every process.

Logs are one JSON object a line (or coloured text on a terminal), carry whatever ids are bound to the current context,
and pass a filter that removes secrets. Traces go to an OTLP endpoint when one is configured. Neither may end a process:
a line that cannot be written is dropped and counted.
"""

import logging
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import IO, TYPE_CHECKING, Any, Final, TextIO, cast

import structlog
from opentelemetry import trace
from prometheus_client import Counter

from penstock.kit.ids import new_id

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_SECRET_NAMES: Final = re.compile(r"(?i)(password|secret|token|authorization|api_?key|private|cookie)")
_SECRET_VALUES: Final = re.compile(r"ps[ks]_[A-Za-z0-9_-]{8,}|(?<=://)[^/@\s:]+:[^/@\s]+(?=@)")
_correlation: ContextVar[str] = ContextVar("correlation_id", default="")

_dropped = Counter("penstock_log_lines_dropped_total", "Lines of the log that could not be written.")
_tracer: Final = trace.get_tracer("penstock")
#: Set once by `configure`; without an endpoint a span costs nothing.
_exporting: list["TracerProvider"] = []


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a module."""
    return structlog.stdlib.get_logger(name)


def correlation_id() -> str:
    """The id that ties together everything one request caused; made when there is none."""
    current = _correlation.get()
    if not current:
        current = new_id("cor")
        _correlation.set(current)
    return current


@contextmanager
def correlated(value: str, **ids: str) -> Iterator[None]:
    """Work under this correlation id, with further ids (project_id, allocation_id, node_id) on each log line."""
    token = _correlation.set(value)
    try:
        with structlog.contextvars.bound_contextvars(correlation_id=value, **ids):
            yield
    finally:
        _correlation.reset(token)


def correlate(value: str) -> None:
    """Work under this correlation id until the current task ends: what `correlated` does, for a task's whole life."""
    _correlation.set(value)
    structlog.contextvars.bind_contextvars(correlation_id=value)


@contextmanager
def span(name: str, **attributes: str | int) -> Iterator[None]:
    """Trace a piece of work. Everything under one correlation id is one trace, whichever process it happens in."""
    if not _exporting:
        yield
        return
    with _tracer.start_as_current_span(name, attributes={"correlation_id": correlation_id(), **attributes}):
        yield


def flush() -> None:
    """Send what has not been sent; for the end of a process."""
    for provider in _exporting:
        provider.shutdown()


class LossyStream:
    """A stream for logs. Writing never fails: on a full disk or a closed pipe the line is dropped and counted."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write and flush, or drop."""
        try:
            if self._stream is None:
                raise ValueError("the stream is closed")
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            _dropped.inc()
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back."""

    def isatty(self) -> bool:
        """Never asked to draw."""
        return False


def lossy(stream: TextIO | None) -> "IO[str]":
    """The stream as libraries expect it."""
    return cast("IO[str]", LossyStream(stream))


def configure(process: str, *, level: str = "info", log_format: str = "json", otlp_endpoint: str = "") -> None:
    """Set up logs and traces once, at the start of a process."""
    numeric = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
    output = lossy(sys.stderr)
    logging.basicConfig(stream=output, level=max(numeric, logging.WARNING), format="%(message)s", force=True)
    renderer = structlog.dev.ConsoleRenderer() if log_format == "text" else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _trace_ids,
            structlog.processors.format_exc_info,
            redact,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(numeric),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", output)),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)
    if otlp_endpoint:
        # Here, because the exporter takes its time to import and most installs never need it.
        from penstock.kit import tracing

        _exporting.append(tracing.export(process, otlp_endpoint, _correlation))


def _trace_ids(_: object, __: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = f"{context.trace_id:032x}"
    return event


def redact(_: object, __: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Replace what looks like a secret, by name or by shape."""
    for name, value in event.items():
        if _SECRET_NAMES.search(name):
            event[name] = "[redacted]"
        elif isinstance(value, str):
            event[name] = _SECRET_VALUES.sub("[redacted]", value)
    return event

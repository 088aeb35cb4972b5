"""Traces on their way to an OTLP endpoint."""

import hashlib
from collections.abc import Sequence
from contextvars import ContextVar

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from prometheus_client import Counter

_dropped = Counter("penstock_spans_dropped_total", "Spans of traces that the OTLP endpoint did not take.")


def export(process: str, endpoint: str, correlation: ContextVar[str]) -> TracerProvider:
    """From now on spans of this process go there."""
    resource = Resource.create({"service.name": f"penstock-{process}"})
    provider = TracerProvider(resource=resource, id_generator=_CorrelatedIds(correlation))
    provider.add_span_processor(BatchSpanProcessor(_Counted(endpoint=f"{endpoint}/v1/traces", timeout=5)))
    trace.set_tracer_provider(provider)
    return provider


class _Counted(OTLPSpanExporter):
    """Counts the spans that are lost."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send them; a failure is a figure, never an exception."""
        outcome = super().export(spans)
        if outcome is not SpanExportResult.SUCCESS:
            _dropped.inc(len(spans))
        return outcome


class _CorrelatedIds(RandomIdGenerator):
    """Trace ids follow from the correlation id, so that no header has to carry them from process to process."""

    def __init__(self, correlation: ContextVar[str]) -> None:
        self._correlation = correlation

    def generate_trace_id(self) -> int:
        """The same for every root span under one correlation id."""
        current = self._correlation.get()
        if not current:
            return super().generate_trace_id()
        return int.from_bytes(hashlib.sha256(current.encode()).digest()[:16])

"""Traces across processes: the enqueue, each attempt, and the runs it caused.

    enqueue (producer) ──traceparent──► run (consumer) ──traceparent──► run of the subscriber

With `pip install holdfast-jobs[otel]` and a tracer provider set by your program or
`opentelemetry-instrument`, runs carry the W3C header `traceparent` through retries, dead letters
and replays, so a chain of runs is one trace. An attempt's span is current inside the handler: spans
you start there are its children.

Without either, tracing is a no-op and a sender's `traceparent` is passed on unchanged.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

H_TRACE = "traceparent"
SYSTEM = {"messaging.system": "nats"}


def on() -> bool:
    """Whether spans are collected: OpenTelemetry is imported and a provider is set."""
    trace = sys.modules.get("opentelemetry.trace")
    return trace is not None and not isinstance(
        trace.get_tracer_provider(), trace.ProxyTracerProvider
    )


def _tracer() -> Tracer:
    from opentelemetry import trace

    return trace.get_tracer("holdfast")


def sent(what: str, headers: dict[str, str], **attributes: str) -> None:
    """Record a producer span and inject it into the headers; keeps an existing `traceparent`."""
    if not on() or H_TRACE in headers:
        return
    from opentelemetry import propagate, trace

    span = _tracer().start_span(
        what, kind=trace.SpanKind.PRODUCER, attributes=SYSTEM | _own(attributes)
    )
    propagate.inject(headers, trace.set_span_in_context(span))
    span.end()


@contextlib.contextmanager
def attempting(what: str, headers: Mapping[str, str], **attributes: Any) -> Iterator[None]:
    """One attempt as a consumer span, child of the sender's, current in this task."""
    from opentelemetry import context as otel
    from opentelemetry import propagate, trace

    parent = propagate.extract(dict(headers))
    span = _tracer().start_span(
        what, parent, kind=trace.SpanKind.CONSUMER, attributes=SYSTEM | _own(attributes)
    )
    otel.attach(trace.set_span_in_context(span, parent))  # each task has its own context
    try:
        yield
    except BaseException as error:
        span.record_exception(error)
        span.set_status(trace.Status(trace.StatusCode.ERROR, type(error).__name__))
        raise
    finally:
        span.end()


def _own(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"holdfast.{name}": value for name, value in attributes.items()}

"""Traces across processes: who sent a run, each attempt at it, and what it caused.

    enqueue (producer) ──traceparent──► run (consumer) ──traceparent──► run of the subscriber

With `pip install holdfast[otel]` and a tracer provider that your program or
`opentelemetry-instrument` has set, runs carry the W3C header `traceparent`. It travels with the run
through retries, dead letters and replays, so that the story of a chain is one trace. An attempt's
span is the current one inside the handler: spans of your own are its children.

Without either this costs nothing, and a `traceparent` that a sender gave goes on as it came.
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
    """Whether somebody collects spans: who does has imported OpenTelemetry and set a provider."""
    trace = sys.modules.get("opentelemetry.trace")
    return trace is not None and not isinstance(
        trace.get_tracer_provider(), trace.ProxyTracerProvider
    )


def _tracer() -> Tracer:
    from opentelemetry import trace

    return trace.get_tracer("holdfast")


def sent(what: str, headers: dict[str, str], **attributes: str) -> None:
    """Mark a sending as a span, and let what is sent carry it; a header that is there stays."""
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
    """One attempt as a span, current in the task that makes it, its parent the sender's."""
    from opentelemetry import context as otel
    from opentelemetry import propagate, trace

    parent = propagate.extract(dict(headers))
    span = _tracer().start_span(
        what, parent, kind=trace.SpanKind.CONSUMER, attributes=SYSTEM | _own(attributes)
    )
    otel.attach(trace.set_span_in_context(span, parent))  # its task has a context to itself
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

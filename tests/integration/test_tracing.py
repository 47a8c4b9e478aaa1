"""One trace from the sender through every attempt to what it caused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from holdfast import Backoff, Context, Holdfast, SyncContext, tracing
from holdfast.server import Server
from holdfast.testing import RunningWorker
from tests.support import until


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What is collected by a provider of this test's own."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def _named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


async def test_trace_spans_enqueue_run_and_chained_run(
    nats: Server, namespace: str, spans: InMemorySpanExporter
) -> None:
    """Sender, first attempt, retry, event, subscriber, its own child span: one trace, in order."""
    app = Holdfast("traced", nats_url=nats.url, namespace=namespace)
    failed: list[int] = []

    @app.job(retry=Backoff.list(["0.1s"]))
    async def first(ctx: Context) -> None:
        if not failed:
            failed.append(ctx.attempt)
            raise ValueError("the first attempt fails")
        await ctx.publish("first-done", {})

    @app.job(on="first-done")
    def second(ctx: SyncContext, event: dict[str, str]) -> None:
        with trace.get_tracer("users").start_as_current_span("inner"):
            ctx.publish("second-done", {})

    async with RunningWorker(app, nats.url, namespace):
        with trace.get_tracer("users").start_as_current_span("request"):
            await (await first.enqueue()).result(timeout=30)
        await until(lambda: _named(spans, "run second"), what="the subscriber's span")
    [request], [enqueue] = _named(spans, "request"), _named(spans, "enqueue first")
    [one, two] = _named(spans, "run first")
    [published], [second_run] = _named(spans, "publish first-done"), _named(spans, "run second")
    [inner], [told] = _named(spans, "inner"), _named(spans, "publish second-done")
    chain = [request, enqueue, two, published, second_run, inner, told]
    for parent, child in pairwise(chain):
        assert parent.context
        assert child.parent
        assert child.parent.span_id == parent.context.span_id, child.name
    assert {span.context.trace_id for span in (*chain, one) if span.context} == {
        request.context.trace_id if request.context else 0
    }
    assert one.parent == two.parent
    assert [s.attributes["holdfast.attempt"] for s in (one, two) if s.attributes] == [1, 2]
    assert one.status.status_code is trace.StatusCode.ERROR
    assert two.status.status_code is trace.StatusCode.UNSET


async def test_senders_own_traceparent_is_kept(
    nats: Server, namespace: str, spans: InMemorySpanExporter
) -> None:
    """A program in any language that sends the header is the parent of the run."""
    app = Holdfast("traced", nats_url=nats.url, namespace=namespace)

    @app.job
    async def work() -> None: ...

    given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with RunningWorker(app, nats.url, namespace):
        await (await work.options(headers={"traceparent": given}).enqueue()).result(timeout=30)
        await until(lambda: _named(spans, "run work"), what="the span")
    [run] = _named(spans, "run work")
    assert run.parent
    assert f"{run.parent.trace_id:032x}" in given
    assert f"{run.parent.span_id:016x}" in given
    assert not _named(spans, "enqueue work")


async def test_without_a_provider_nothing_is_added(nats: Server, namespace: str) -> None:
    """OpenTelemetry being installed is not enough: somebody must collect."""
    app = Holdfast("untraced", nats_url=nats.url, namespace=namespace)
    seen: list[dict[str, str]] = []

    @app.job
    async def work(ctx: Context) -> None:
        seen.append(dict(ctx.headers))

    assert not tracing.on()
    async with RunningWorker(app, nats.url, namespace):
        await (await work.enqueue()).result(timeout=30)
    assert [name for headers in seen for name in headers if "trace" in name.lower()] == []

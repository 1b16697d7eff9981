"""Spans of calls and stages that overlap: of threads, of tasks, one within the other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import dataplane
from dataplane.telemetry.identity import followed
from dataplane.telemetry.provider import Ids
from dataplane.telemetry.spans import MAX_STAGE_GROUPS, Spans


class Kept:
    """The spans of a client of no plane, and what became of them."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer: Any = provider.get_tracer("tests")
        self.tracer.id_generator = Ids(self.tracer.id_generator)
        self.spans = Spans(self.tracer, lambda: "plane", 1.0)

    def call(self, name: str, **about: Any) -> Any:
        """A verb that asks one thing and is done."""

        def verb() -> Generator[str, Any, None]:
            yield "ask"

        return self.spans.around(name, verb(), about)

    def put(self, uid: str) -> None:
        list(self.call("kv_put", key=uid, partition_id="p", tags={"uid": uid, "is_prompt": True}))

    @property
    def ended(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def of(self, uid: str) -> list[str]:
        """Names of the spans in a group's trace, as they ended."""
        trace_id = followed("plane", "p", uid).trace_id
        return [span.name for span in self.ended if span.context.trace_id == trace_id]


@pytest.fixture
def kept() -> Kept:
    return Kept()


def test_a_stage_is_of_what_is_done_in_spans_within_it(kept: Kept) -> None:
    with kept.spans.stage("outer", None, None), kept.spans.stage("named", "p", ["other"]):
        with kept.spans.stage("inner", None, None):
            kept.put("u")
        kept.put("v")
    assert kept.of("u") == ["dataplane.kv_put", "inner", "outer"]
    assert kept.of("v") == ["dataplane.kv_put", "outer"]
    assert kept.of("other") == ["named"]


def test_stages_of_many_threads_lose_nothing(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, rounds = 8, 50
    # A stage is also of what other threads do meanwhile, and none of it is to be left out here.
    monkeypatch.setattr("dataplane.telemetry.spans.MAX_GROUPS", threads * rounds)
    gate = threading.Barrier(threads)
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            gate.wait()
            for at in range(rounds):
                with kept.spans.stage(f"stage {number}", None, None):
                    kept.put(f"u{number}_{at}")
        except BaseException as error:
            failed.append(error)

    each = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    assert not failed
    for number in range(threads):
        for at in range(rounds):
            assert f"stage {number}" in kept.of(f"u{number}_{at}")
    # The put that began each group is its root, whoever else made spans meanwhile.
    roots = [span for span in kept.ended if span.name == "dataplane.kv_put"]
    assert {span.context.span_id for span in roots} == {
        followed("plane", "p", f"u{number}_{at}").root_id
        for number in range(threads)
        for at in range(rounds)
    }


def test_a_stage_remembers_so_many_groups(kept: Kept) -> None:
    with kept.spans.stage("long", None, None):
        for first in range(0, MAX_STAGE_GROUPS + 200, 100):
            keys = [f"k{first + at}" for at in range(100)]
            list(kept.call("kv_batch_put", keys=keys, partition_id="p", tags=None))
        (touched,) = kept.spans._stages
        assert len(touched) == MAX_STAGE_GROUPS


def test_a_span_that_cannot_be_made_fails_nothing(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    def uids() -> Iterator[str]:
        raise RuntimeError("no uids")
        yield ""

    with kept.spans.stage("named", "p", uids()):
        kept.put("u")
    list(kept.call("kv_commit", claim=None))
    assert kept.of("u") == ["dataplane.kv_put"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_no_ids_are_left_for_another_span() -> None:
    ids = Ids(TracerProvider().id_generator)
    with ids.given(7, 8):
        assert (ids.generate_trace_id(), ids.generate_span_id()) == (7, 8)
    assert ids.generate_trace_id() != 7
    with pytest.raises(RuntimeError), ids.given(7, 8):
        raise RuntimeError
    assert ids.generate_span_id() != 8


def test_calls_of_tasks_at_once_are_each_in_their_callers_trace(
    kept: Kept, plane_settings: dict[str, Any]
) -> None:
    """Of one asyncio client, whose calls wait in each other's middle."""
    count = 12

    async def one(client: dataplane.AsyncClient, number: int) -> tuple[int, int]:
        with kept.tracer.start_as_current_span(f"task {number}") as mine:
            await client.kv_put(f"k{number}", "p", tags={"uid": f"u{number}"})
            await client.kv_list("p")
            assert trace.get_current_span() is mine
            return number, mine.get_span_context().span_id

    async def all_of_them(client: dataplane.AsyncClient) -> dict[int, int]:
        return dict(await asyncio.gather(*(one(client, number) for number in range(count))))

    settings = {**plane_settings, "host": "embedded"}
    with dataplane.init(settings, name="at-once") as plane:

        async def run() -> dict[int, int]:
            async with await dataplane.async_connect("at-once", config=settings) as client:
                client._core.spans = kept.spans
                return await all_of_them(client)

        mine = asyncio.run(run())
        plane.close(destroy=True)
    for number, span_id in mine.items():
        within = [s.name for s in kept.ended if s.parent and s.parent.span_id == span_id]
        assert within == ["dataplane.kv_put", "dataplane.kv_list"], number

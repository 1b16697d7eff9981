"""Spans of a client's verbs, and of the groups that they are about.

A call has a span in its caller's own trace, if the caller has one. Each group that is followed has
a short one of the same name in the group's trace, linked to it: the trace of a group is known from
its uid, so nothing travels with a request. A call that is about one followed group, of a caller who
traces nothing, has that one span.

Nothing here fails a call: what goes wrong with a span is logged once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from opentelemetry import trace
from opentelemetry.trace import Link, SpanKind, StatusCode, TraceFlags

from dataplane.logs.escaping import one_line
from dataplane.telemetry.calls import NAME_CHARS, Call, outcome
from dataplane.telemetry.groups import MAX_GROUPS, Group, Known
from dataplane.telemetry.identity import Followed, followed
from dataplane.telemetry.provider import Ids, flush

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext

log = logging.getLogger("dataplane.telemetry")

Result = TypeVar("Result")

MAX_STAGE_GROUPS: Final = 4096
"""Groups of one stage that are remembered until it ends."""


class Spans:
    """Makes the spans of one client. Usable from any thread."""

    def __init__(self, made: Any, plane_id: Callable[[], str], sample: float) -> None:
        self._tracer = made
        self._plane_id = plane_id
        self._sample = sample
        self._lock = threading.Lock()  # guards what is known, and the stages
        self._known = Known()
        self._stages: list[dict[tuple[str, str], None]] = []
        self._failed = False

    # -- verbs -------------------------------------------------------------------------------

    def around(
        self, name: str, verb: Generator[Any, Any, Result], about: Mapping[str, Any]
    ) -> Generator[Any, Any, Result]:
        """The same verb, with a span around it."""
        spanned = self._around(name, verb, about)
        known: Any = verb
        cast("Any", spanned).__name__ = known.__name__  # what else looks at verbs knows them by it
        return spanned

    def _around(
        self, name: str, verb: Generator[Any, Any, Result], about: Mapping[str, Any]
    ) -> Generator[Any, Any, Result]:
        call = self._safely(lambda: self._begin(name, about))
        if call is None:
            return (yield from verb)
        try:
            result = yield from call.counted(verb)
        except BaseException as error:
            failed = error
            self._safely(lambda: self._end(call, None, failed))
            raise
        self._safely(lambda: self._end(call, result, None))
        return result

    def _begin(self, name: str, about: Mapping[str, Any]) -> Call:
        call = Call(name, about)
        # Nobody's current one: of an asyncio client, other tasks run before it ends.
        if trace.get_current_span().get_span_context().is_valid:
            call.span = self._of_call(call)
        return call

    def _of_call(self, call: Call) -> Span:
        return self._tracer.start_span(
            f"dataplane.{call.name}", kind=SpanKind.CLIENT, start_time=call.began
        )

    def _end(self, call: Call, result: Any, error: BaseException | None) -> None:
        ended = time.time_ns()
        with self._lock:
            partition_id, groups = call.groups(result, self._known)
            for touched in self._stages:
                for group in groups[: MAX_STAGE_GROUPS - len(touched)]:
                    touched[partition_id, group.identity] = None
        attributes = call.attributes(partition_id, result, error)
        found = self._followed(partition_id, groups)
        if call.span is None and len(groups) > 1 and found:
            # Of a caller who traces nothing: the begin of a trace of its own.
            call.span = self._of_call(call)
        self._spans_of_groups(
            f"dataplane.{call.name}", found, call.span, attributes, call.began, ended, error,
            SpanKind.CLIENT,
        )  # fmt: skip
        if call.span is not None:
            _finish(call.span, attributes, ended, error)

    # -- stages ------------------------------------------------------------------------------

    @contextmanager
    def stage(
        self, name: str, partition_id: str | None, uids: Iterable[str] | None
    ) -> Generator[None]:
        """A span of what is done within the context: of these groups, or where none are named of
        those that calls of this client were about meanwhile."""
        began = time.time_ns()
        named = None if uids is None else self._safely(lambda: list(dict.fromkeys(uids))) or []
        touched: dict[tuple[str, str], None] = {}
        if named is None:
            with self._lock:
                self._stages.append(touched)
        span: Span | None = None
        if trace.get_current_span().get_span_context().is_valid:
            span = self._safely(
                lambda: cast("Span", self._tracer.start_span(name, start_time=began))
            )
        error: BaseException | None = None
        try:
            if span is None:
                yield
            else:
                with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                    yield
        except BaseException as failed:
            error = failed
            raise
        finally:
            ended = time.time_ns()
            if named is None:
                with self._lock:
                    # By what it is: any two at which nothing was touched are equal.
                    self._stages = [each for each in self._stages if each is not touched]
                of = _by_partition(touched)
            else:
                of = {partition_id or "": named}
            self._safely(lambda: self._end_stage(name, of, span, began, ended, error))

    def _end_stage(
        self,
        name: str,
        of: Mapping[str, Sequence[str]],
        span: Span | None,
        began: int,
        ended: int,
        error: BaseException | None,
    ) -> None:
        attributes: dict[str, Any] = {"dataplane.outcome": outcome(error)}
        for partition_id, identities in of.items():
            mine = {**attributes, "dataplane.partition": one_line(partition_id, NAME_CHARS)}
            found = self._followed(partition_id, [Group(identity) for identity in identities])
            self._spans_of_groups(name, found, span, mine, began, ended, error, SpanKind.INTERNAL)
        if span is not None:
            _finish(span, attributes, ended, error)

    # -- groups ------------------------------------------------------------------------------

    def learn(self, partition_id: str, keys: Iterable[str], uids: Iterable[object]) -> None:
        """These keys are of these groups."""
        with self._lock:
            self._known.learn(partition_id, keys, uids)

    def _followed(self, partition_id: str, groups: Sequence[Group]) -> list[tuple[Group, Followed]]:
        """Those of the groups that are followed; of many the same ones in every process."""
        plane_id = self._plane_id()
        found: list[tuple[Group, Followed]] = []
        for group in groups:
            of = followed(plane_id, partition_id, group.identity)
            if of.within(self._sample):
                found.append((group, of))
        if len(found) > MAX_GROUPS:
            found.sort(key=lambda pair: pair[1].trace_id & 0xFFFF_FFFF_FFFF_FFFF)
            del found[MAX_GROUPS:]
        return found

    def _spans_of_groups(
        self,
        name: str,
        found: Sequence[tuple[Group, Followed]],
        call: Span | None,
        attributes: Mapping[str, Any],
        began: int,
        ended: int,
        error: BaseException | None,
        kind: SpanKind,
    ) -> None:
        links = [] if call is None else [Link(call.get_span_context())]
        for group, of in found:
            span = self._started(name, group, of, links, began, kind)
            if call is not None:
                call.add_link(span.get_span_context())
            mine = {**attributes, "dataplane.uid": one_line(group.identity, NAME_CHARS)}
            _finish(span, mine, ended, error)

    def _started(
        self, name: str, group: Group, of: Followed, links: list[Link], began: int, kind: SpanKind
    ) -> Span:
        ids = getattr(self._tracer, "id_generator", None)
        if group.begins and isinstance(ids, Ids):
            context = trace.set_span_in_context(trace.INVALID_SPAN)
            with ids.given(*of):
                return self._tracer.start_span(
                    name, context=context, kind=kind, links=links, start_time=began
                )
        context = trace.set_span_in_context(trace.NonRecordingSpan(_root(of)))
        return self._tracer.start_span(
            name, context=context, kind=kind, links=links, start_time=began
        )

    # -- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Send what was not sent yet: its process may end without another chance to."""
        self._safely(flush)

    def _safely(self, work: Callable[[], Result]) -> Result | None:
        try:
            return work()
        except Exception as error:
            if not self._failed:
                log.warning("a span could not be made: %s", error, exc_info=True)
            self._failed = True
            return None


def _root(of: Followed) -> SpanContext:
    return trace.SpanContext(
        of.trace_id, of.root_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )


def _finish(
    span: Span, attributes: Mapping[str, Any], ended: int, error: BaseException | None
) -> None:
    span.set_attributes(attributes)
    if error is not None:
        span.set_status(StatusCode.ERROR, one_line(str(error), 300))
    span.end(ended)


def _by_partition(touched: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for partition_id, identity in touched:
        found.setdefault(partition_id, []).append(identity)
    return found

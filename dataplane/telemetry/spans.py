"""Spans of a client's verbs, and of the groups that they are about.

A call has a span in its caller's own trace, if the caller has one. Each group that is followed has
a short one of the same name in the group's trace, linked to it: the trace of a group is known from
its uid, so nothing travels with a request. A call that is about one followed group, of a caller who
traces nothing, has that one span.

Nothing here fails a call: what goes wrong with a span is logged once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from opentelemetry import trace
from opentelemetry.trace import Link, SpanKind, StatusCode, TraceFlags

from dataplane.logs.escaping import one_line
from dataplane.telemetry.groups import MAX_GROUPS, Group, Known, uids_in
from dataplane.telemetry.identity import Followed, followed
from dataplane.telemetry.provider import Ids

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext

log = logging.getLogger("dataplane.telemetry")

Result = TypeVar("Result")

SAMPLE_KEYS: Final = 3
KEY_CHARS: Final = 128
MAX_STAGE_GROUPS: Final = 4096
"""Groups of one stage that are remembered until it ends."""


class Call:
    """One call under way."""

    __slots__ = ("about", "began", "caller", "groups", "name", "nbytes", "partition_id", "span")

    def __init__(self, name: str, about: Mapping[str, Any], caller: Span | None) -> None:
        self.name = name
        self.about = about
        self.caller = caller
        self.began = time.time_ns()
        self.span: Span | None = None
        self.nbytes = 0
        self.groups: list[Group] = []
        self.partition_id = ""


class Spans:
    """Makes the spans of one client. Usable from any thread."""

    def __init__(self, made: Any, plane_id: Callable[[], str], sample: float) -> None:
        self._tracer = made
        self._plane_id = plane_id
        self._sample = sample
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
            result = yield from _counted(verb, call)
        except BaseException as error:
            failed = error
            self._safely(lambda: self._end(call, None, failed))
            raise
        self._safely(lambda: self._end(call, result, None))
        return result

    def _begin(self, name: str, about: Mapping[str, Any]) -> Call:
        caller = trace.get_current_span()
        call = Call(name, about, caller if caller.get_span_context().is_valid else None)
        if call.caller is not None:
            call.span = self._tracer.start_span(
                f"dataplane.{name}", kind=SpanKind.CLIENT, start_time=call.began
            )
        return call

    def _end(self, call: Call, result: Any, error: BaseException | None) -> None:
        ended = time.time_ns()
        call.partition_id, call.groups = self._groups(call, result)
        if self._stages and call.groups:
            mine = self._stages[-1]
            for group in call.groups:
                if len(mine) < MAX_STAGE_GROUPS:
                    mine[call.partition_id, group.identity] = None
        attributes = _attributes(call, result, error)
        found = self._followed(call.partition_id, call.groups)
        if call.span is None and len(call.groups) > 1 and found:
            # Of a caller who traces nothing: the begin of a trace of its own.
            call.span = self._tracer.start_span(
                f"dataplane.{call.name}", kind=SpanKind.CLIENT, start_time=call.began
            )
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
        named = None if uids is None else list(dict.fromkeys(uids))
        touched: dict[tuple[str, str], None] = {}
        self._stages.append(touched)
        caller = trace.get_current_span()
        span: Span | None = None
        if caller.get_span_context().is_valid:
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
            self._stages.remove(touched)
            ended = time.time_ns()
            of = {partition_id or "": named} if named is not None else _by_partition(touched)
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
        attributes: dict[str, Any] = {"dataplane.outcome": _outcome(error)}
        for partition_id, identities in of.items():
            mine = {**attributes, "dataplane.partition": one_line(partition_id, KEY_CHARS)}
            found = self._followed(partition_id, [Group(identity) for identity in identities])
            self._spans_of_groups(name, found, span, mine, began, ended, error, SpanKind.INTERNAL)
        if span is not None:
            _finish(span, attributes, ended, error)

    # -- groups ------------------------------------------------------------------------------

    def learn(self, partition_id: str, keys: Iterable[str], uids: Iterable[object]) -> None:
        """These keys are of these groups."""
        self._known.learn(partition_id, keys, uids)

    def _groups(self, call: Call, result: Any) -> tuple[str, list[Group]]:
        about, known = call.about, self._known
        partition_id = str(about.get("partition_id") or "")
        match call.name:
            case "kv_put" | "kv_batch_put":
                keys, tags = _rows_of(about)
                return partition_id, known.of_put(
                    partition_id, keys, tags, about.get("attempt"), must_exist=_must_exist(about)
                )
            case "kv_batch_get" | "kv_view":
                return partition_id, known.of_keys(partition_id, _keys_of(about))
            case "kv_claim" if result is not None:
                meta = getattr(result, "meta", result)
                known.learn(partition_id, meta.keys, (tags.get("uid") for tags in meta.tags))
                return partition_id, known.of_keys(partition_id, meta.keys)
            case "kv_commit" | "kv_release":
                meta = about["claim"].meta
                known.learn(meta.partition_id, meta.keys, (tag.get("uid") for tag in meta.tags))
                return meta.partition_id, known.of_keys(meta.partition_id, meta.keys)
            case "kv_clear":
                named = uids_in(about.get("where"))
                groups = [Group(uid) for uid in named]
                return partition_id, groups or known.of_keys(partition_id, _keys_of(about))
            case "begin_group":
                if type(result) is int:
                    known.began(result, partition_id, about["uid"])
                return partition_id, [Group(about["uid"])]
            case "end_group":
                found = known.of_attempt(about.get("attempt"))
                return ("", []) if found is None else (found[0], [Group(found[1])])
            case "kv_list" | "kv_wait" if result is not None:
                known.learn_rows(partition_id, result)
            case _:
                pass
        return partition_id, []

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
            mine = {**attributes, "dataplane.uid": one_line(group.identity, KEY_CHARS)}
            _finish(span, mine, ended, error)

    def _started(
        self, name: str, group: Group, of: Followed, links: list[Link], began: int, kind: SpanKind
    ) -> Span:
        ids = getattr(self._tracer, "id_generator", None)
        if group.begins and isinstance(ids, Ids):
            ids.give(*of)
            context = trace.set_span_in_context(trace.INVALID_SPAN)
        else:
            context = trace.set_span_in_context(trace.NonRecordingSpan(_root(of)))
        return self._tracer.start_span(
            name, context=context, kind=kind, links=links, start_time=began
        )

    def _safely(self, work: Callable[[], Result]) -> Result | None:
        try:
            return work()
        except Exception as error:
            if not self._failed:
                log.warning("a span could not be made: %s", error, exc_info=True)
            self._failed = True
            return None


def _counted(verb: Generator[Any, Any, Result], call: Call) -> Generator[Any, Any, Result]:
    """The same verb; the bytes that its steps move are counted."""
    value: Any = None
    error: BaseException | None = None
    try:
        while True:
            effect = verb.send(value) if error is None else verb.throw(error)
            value = error = None
            # Of requests that carry values, and of copies (`client.effects`); others have neither.
            call.nbytes += getattr(effect, "payload_bytes", 0) + getattr(effect, "nbytes", 0)
            try:
                value = yield effect
            except GeneratorExit:
                verb.close()
                raise
            except BaseException as thrown:
                error = thrown
    except StopIteration as end:
        return end.value


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


def _outcome(error: BaseException | None) -> str:
    return "ok" if error is None else type(error).__name__


def _attributes(call: Call, result: Any, error: BaseException | None) -> dict[str, Any]:
    about = call.about
    found: dict[str, Any] = {"dataplane.outcome": _outcome(error)}
    if call.partition_id:
        found["dataplane.partition"] = one_line(call.partition_id, KEY_CHARS)
    keys = getattr(result, "keys", None)
    if not isinstance(keys, list):
        keys = _keys_of(about)
    rows = cast("list[Any]", keys)
    count = len(rows) or (result if call.name == "kv_clear" and type(result) is int else 0)
    if count:
        found["dataplane.rows"] = count
        found["dataplane.key_sample"] = [one_line(str(k), KEY_CHARS) for k in rows[:SAMPLE_KEYS]]
    if call.nbytes:
        found["dataplane.bytes"] = call.nbytes
    for name in ("task", "attempt", "status"):
        value = about.get(name)
        if value is not None:
            found[f"dataplane.{name}"] = one_line(value) if type(value) is str else value
    stage = about.get("stage")
    if stage:
        found["dataplane.stage"] = stage
    return found


def _keys_of(about: Mapping[str, Any]) -> list[str]:
    claim = about.get("claim")
    keys: Any = about.get("keys") if claim is None else claim.keys
    if keys is None:
        key = about.get("key")
        return [key] if type(key) is str else []
    return [key for key in keys if type(key) is str]


def _rows_of(about: Mapping[str, Any]) -> tuple[list[str], list[Mapping[str, object]]]:
    tags: Any = about.get("tags")
    if "key" in about:
        tags = None if tags is None else [tags]
    return _keys_of(about), [] if tags is None else list(tags)


def _must_exist(about: Mapping[str, Any]) -> bool:
    from dataplane.wire.messages import MUST_EXIST

    return bool(about.get("must_exist")) or bool(int(about.get("flags") or 0) & MUST_EXIST)


def _by_partition(touched: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for partition_id, identity in touched:
        found.setdefault(partition_id, []).append(identity)
    return found

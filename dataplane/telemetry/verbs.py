"""How a verb comes to have a span: a mark at its function, which costs the look at one attribute
where nothing is traced. Imports nothing of OpenTelemetry."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from dataplane.telemetry.spans import Spans


class Traced(Protocol):
    """Who the verbs of a client are given."""

    spans: Spans | None
    """What makes its spans; None where its setting `otel` is off."""


Who = TypeVar("Who", bound=Traced)
Args = ParamSpec("Args")
Effect = TypeVar("Effect")
Result = TypeVar("Result")


def span_of(
    who: Traced, name: str, partition_id: str | None = None, uids: Iterable[str] | None = None
) -> AbstractContextManager[None]:
    """A context that is a span of these groups, or where none are named of those that calls of the
    client were about meanwhile; nothing for a client who does not trace."""
    spans = who.spans
    return nullcontext() if spans is None else spans.stage(name, partition_id, uids)


def spanned(
    name: str,
) -> Callable[
    [Callable[Concatenate[Who, Args], Generator[Effect, Any, Result]]],
    Callable[Concatenate[Who, Args], Generator[Effect, Any, Result]],
]:
    """The verb of this name is traced, for clients who trace."""

    def mark(
        verb: Callable[Concatenate[Who, Args], Generator[Effect, Any, Result]],
    ) -> Callable[Concatenate[Who, Args], Generator[Effect, Any, Result]]:
        names = list(inspect.signature(verb).parameters)[1:]

        @wraps(verb)
        def begin(
            who: Who, *args: Args.args, **named: Args.kwargs
        ) -> Generator[Effect, Any, Result]:
            spans = who.spans
            if spans is None:
                return verb(who, *args, **named)
            about = {**dict(zip(names, args, strict=False)), **named}
            about.setdefault("stage", getattr(who, "stage", None))
            return spans.around(name, verb(who, *args, **named), about)

        return begin

    return mark

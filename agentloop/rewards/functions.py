"""Rule functions as rewards: plain callables, found by object or by dotted path.

Two forms are understood. One trajectory at a time: `f(state) -> float | dict`. A batch, as TRL
passes it: `f(prompts, completions, **columns) -> list[float]`, where a column is what the dataset's
rows have under that name. Either may be a coroutine function; others run in threads.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeAlias, cast

from agentloop.dotted import load
from agentloop.rewards.deadline import Threads, within
from agentloop.rewards.scores import verdict, verdicts
from agentloop.rewards.types import RewardError
from agentloop.trajectory.state import RolloutState

Form: TypeAlias = Literal["state", "batch"]
Texts: TypeAlias = Literal["messages", "text"]

_GIVEN: Final = ("prompts", "completions", "completion_ids")
"""Arguments of the batch form that are no columns; a column of such a name is not passed."""


class FunctionReward:
    """A rule function as a reward."""

    def __init__(
        self,
        function: Callable[..., Any] | str,
        *,
        form: Form | None = None,
        texts: Texts = "messages",
        timeout_s: float = 30.0,
        threads: int = 4,
        none_score: float | None = None,
    ) -> None:
        """
        Args:
            function: The callable, or where it is: "package.module:name".
            form: `state` or `batch`; None: `batch` if it has a parameter `completions`.
            texts: What the batch form gets: lists of chat messages, or plain strings (the last
                message of the prompt, and the response).
            timeout_s: Of one call.
            threads: How many calls of a blocking function run at once.
            none_score: The score of a trajectory for which the function returns None, as TRL's
                functions do where they do not apply. Without one, None is an error.
        """
        self._function = load(function) if isinstance(function, str) else function
        self.name = function if isinstance(function, str) else _name_of(function)
        if not callable(self._function):
            raise ValueError(f"{self.name} is a {type(self._function).__name__}, not a function")
        parameters = _parameters(self._function)
        if form is None:
            form = "batch" if parameters is not None and "completions" in parameters else "state"
        if form not in ("state", "batch") or texts not in ("messages", "text"):
            raise ValueError(f"a rule function has no form {form!r} with texts {texts!r}")
        self._form: Form = form
        self._texts: Texts = texts
        self._parameters = parameters
        self._timeout_s = timeout_s
        self._none_score = none_score
        self._is_async = _is_async(self._function)
        self._threads = Threads(threads)

    async def score(self, states: Sequence[RolloutState]) -> list[dict[str, Any]]:
        if self._form == "batch":
            said = await self._call(**self._batch(states))
            return verdicts(self._without_none(said), len(states))
        calls = [self._call_one(state) for state in states]
        each = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in each:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in each if not isinstance(outcome, BaseException)]

    async def _call_one(self, state: RolloutState) -> dict[str, Any]:
        said = await self._call(state)
        return verdict(self._none_score if said is None else said)

    async def _call(self, *args: Any, **kwargs: Any) -> Any:
        call = partial(self._function, *args, **kwargs)
        if self._is_async:
            return await within(_awaited(call()), self._timeout_s, self.name)
        said = await self._threads.call(call, self._timeout_s, self.name)
        if inspect.isawaitable(said):
            return await within(_awaited(said), self._timeout_s, self.name)
        return said

    def _without_none(self, said: Any) -> Any:
        if self._none_score is None or not isinstance(said, list):
            return said
        return [self._none_score if s is None else s for s in cast(list[Any], said)]

    # -- the batch form ----------------------------------------------------------------------

    def _batch(self, states: Sequence[RolloutState]) -> dict[str, Any]:
        """The arguments: every column, or those that the function can take.

        Raises:
            RewardError: it demands a column that no row has.
        """
        given: dict[str, Any] = {
            "prompts": [self._prompt(state) for state in states],
            "completions": [self._completion(state) for state in states],
            "completion_ids": [list(state.response_ids or ()) for state in states],
        }
        names = dict.fromkeys(name for state in states for name in state.row if name not in _GIVEN)
        columns = {name: [state.row.get(name) for state in states] for name in names}
        if self._parameters is None:
            return {**columns, **given}
        kinds = {parameter.kind for parameter in self._parameters.values()}
        if inspect.Parameter.VAR_KEYWORD in kinds:
            taken = {**columns, **given}
        else:
            taken = {n: v for n, v in {**columns, **given}.items() if n in self._parameters}
        absent = [
            name
            for name, parameter in self._parameters.items()
            if name not in taken
            and parameter.default is inspect.Parameter.empty
            and parameter.kind
            not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        ]
        if absent:
            raise RewardError(
                f"{self.name} takes the columns {', '.join(absent)}, and the rows have "
                f"{', '.join(names) or 'none'}"
            )
        return taken

    def _prompt(self, state: RolloutState) -> Any:
        if self._texts == "messages":
            return [dict(message) for message in state.messages]
        return state.messages[-1].get("content", "") if state.messages else ""

    def _completion(self, state: RolloutState) -> Any:
        text = state.response or ""
        return text if self._texts == "text" else [{"role": "assistant", "content": text}]


async def _awaited(work: Any) -> Any:
    return await work


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004, an object whose method is one
    )


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """None for callables of C that do not say."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__name__)

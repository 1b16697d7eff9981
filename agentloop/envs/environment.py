"""An environment as TRL has them, accepted as it is: one object per session.

A class with `reset(**row)`, which returns a text to begin with or None. Its other public methods
are tools, described by their types and docstrings. `get_reward()`, or the attribute `reward`, is
the session's score; `done`, if it is there and true, ends the session; `close()` is called at the
end. Methods may be blocking or coroutine functions; those of one object never run at the same time,
and the blocking ones in one thread, for what belongs to a thread (a browser, a database).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from agentloop.tools.function import FunctionTool, function_schema
from agentloop.tools.threads import OneAtATime
from agentloop.tools.types import Tool, text_of

_log = logging.getLogger(__name__)

_RESERVED: Final = ("reset", "get_reward")


class EnvironmentFailed(RuntimeError):
    """An environment could not be made, reset or asked for its reward; the session has failed."""

    failure = "environment"
    """The kind that failures are counted by."""


class Environment:
    """One environment of one session. `open` makes it, `close` must be called at the end."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._runner = OneAtATime()
        self._object: Any = None
        self._closed = False
        self.tools: Mapping[str, Tool] = {}

    async def open(self, factory: Callable[[], Any], row: Mapping[str, Any]) -> str | None:
        """Make and reset it. Returns what it says first.

        Raises:
            EnvironmentFailed: it could not, or took too long.
        """
        await self._bounded("be made", self._make, factory)
        reset = getattr(self._object, "reset", None)
        if not callable(reset):
            raise EnvironmentFailed(f"{self._name} has no method `reset`")
        owner: type = self._object.__class__
        try:
            self.tools = {
                name: FunctionTool(method, _schema(owner, name, method), run=self._runner.run)
                for name, method in _methods(self._object).items()
            }
        except ValueError as error:
            raise EnvironmentFailed(str(error)) from error
        opening = await self._bounded("reset", reset, **row)
        return None if opening is None else text_of(opening)

    def is_over(self) -> bool:
        """Whether it says that it is done."""
        return getattr(self._object, "done", False) is True

    async def score(self) -> float | None:
        """Its reward for the session; None if it has none.

        Raises:
            EnvironmentFailed: it could not say, or its reward is no number.
        """
        ask = getattr(self._object, "get_reward", None)
        if callable(ask):
            reward = await self._bounded("say its reward", ask)
        else:
            reward = getattr(self._object, "reward", None)
        if reward is None or callable(reward):
            return None
        try:
            score = float(reward)
        except (TypeError, ValueError):
            raise EnvironmentFailed(f"the reward of {self._name} is {reward!r}") from None
        if not math.isfinite(score):
            raise EnvironmentFailed(f"the reward of {self._name} is {score}")
        return score

    async def close(self) -> None:
        """Let it clean up; what goes wrong is logged."""
        self._closed = True
        close = self._closing()
        try:
            if close is not None:
                await self._bounded("close", close)
        except EnvironmentFailed as error:
            _log.warning("an environment was not closed in order: %s", error)
        finally:
            self._runner.close()

    def _make(self, factory: Callable[[], Any]) -> None:
        """In its thread, and perhaps after nobody waits any more."""
        self._object = factory()
        close = self._closing()
        if self._closed and close is not None:
            close()

    def _closing(self) -> Callable[..., Any] | None:
        close = getattr(self._object, "close", None)
        return close if callable(close) and "close" not in self.tools else None

    async def _bounded(
        self, doing: str, function: Callable[..., Any], *arguments: Any, **named: Any
    ) -> Any:
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return await self._runner.run(function, *arguments, **named)
        except Exception as error:
            if deadline.expired():
                reason = f"within {self._timeout_s:g} s"
            else:
                reason = f"{type(error).__name__}: {error}"
            raise EnvironmentFailed(f"{self._name} could not {doing}: {reason}") from error


_SCHEMAS: dict[tuple[type, str], dict[str, Any]] = {}
"""Of methods that were read before: the same for every object of a class."""


def _schema(owner: type, name: str, method: Callable[..., Any]) -> dict[str, Any]:
    known = _SCHEMAS.get((owner, name))
    if known is None:
        known = _SCHEMAS[owner, name] = function_schema(method)
    return known


def _methods(environment: object) -> dict[str, Callable[..., Any]]:
    """Its public methods that are tools. Properties are not touched."""
    methods: dict[str, Callable[..., Any]] = {}
    for name in dir(type(environment)):
        if name.startswith("_") or name in _RESERVED:
            continue
        declared = inspect.getattr_static(environment, name)
        if not inspect.isfunction(declared) and not isinstance(declared, classmethod):
            continue
        method = getattr(environment, name)
        if name == "close" and not inspect.signature(method).parameters:
            continue
        methods[name] = method
    return methods


def name_of(factory: Callable[[], Any]) -> str:
    """What an environment is called in messages."""
    if isinstance(factory, partial):
        return name_of(factory.func)
    return getattr(factory, "__qualname__", None) or type(factory).__name__

"""The loop of a policy in an environment: its methods are the tools, its reward is the score."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from agentloop.dotted import load
from agentloop.envs.environment import Environment, name_of
from agentloop.loops.tool_agent import ToolAgentLoop, Toolbox
from agentloop.tools.types import Tool, schema_of
from agentloop.trajectory.state import RolloutState


class EnvLoop(ToolAgentLoop):
    """Gives each session an environment of its own, made by `factory` and closed at the end.

    `factory` is a class or function without arguments, a dotted name of one, or a map of several:
    then a row's `environment` says which. `reset` is called with the row's columns and `prompt`,
    its messages; what it returns is put behind the prompt's last message. `tools` are there beside
    the environment's own. A session that was interrupted begins anew.
    """

    def __init__(
        self,
        factory: Callable[[], Any] | str | Mapping[str, Callable[[], Any] | str],
        tools: Sequence[Tool] = (),
        *,
        environment_timeout_s: float = 60.0,
        **arguments: Any,
    ) -> None:
        """`environment_timeout_s` bounds making, reset, reward and close, each; the other arguments
        are those of `ToolAgentLoop`."""
        super().__init__(tools, **arguments)
        self._environment_timeout_s = environment_timeout_s
        self._routes = isinstance(factory, Mapping)
        by_name = cast(
            "Mapping[str, Callable[[], Any] | str]",
            factory if isinstance(factory, Mapping) else {"": factory},
        )
        self._factories = {name: _loaded(made_by) for name, made_by in by_name.items()}

    @asynccontextmanager
    async def toolbox(self, state: RolloutState) -> AsyncGenerator[Toolbox]:
        row = {"prompt": state.messages, **state.row}
        name = str(row.pop("environment", None)) if self._routes else ""
        if name not in self._factories:
            raise ValueError(f"no environment {name!r}; there are {', '.join(self._factories)}")
        factory = self._factories[name]
        environment = Environment(name_of(factory), self._environment_timeout_s)
        try:
            opening = await environment.open(factory, row)
            tools = {**self._toolbox.tools, **environment.tools}
            yield Toolbox(
                tools,
                [schema_of(tool) for tool in tools.values()],
                opening,
                is_over=environment.is_over,
                score=environment.score,
                continues=False,
            )
        finally:
            await environment.close()


def _loaded(factory: Callable[[], Any] | str) -> Callable[[], Any]:
    found: Any = load(factory) if isinstance(factory, str) else factory
    if not callable(found):
        raise ValueError(f"{factory!r} makes no environment: it cannot be called")
    return found

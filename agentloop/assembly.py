"""From settings to a producer: its client, tokenizer, engine, loops and judges."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import dataplane
from agentloop.config import PlaneConfig, TaskConfig, WorkerConfig
from agentloop.dotted import load
from agentloop.engines import make_engine
from agentloop.engines.supervised import SupervisedEngine
from agentloop.engines.types import Engine, Sampling
from agentloop.groups.plane_clock import PlaneClock
from agentloop.groups.producer import Producer
from agentloop.groups.task import Task
from agentloop.loops.chat import ChatTokenizer
from agentloop.loops.loop import AgentLoop
from agentloop.rewards import make_reward
from agentloop.tools.registry import make_tools
from dataplane import AsyncClient, async_connect


async def join_plane(
    plane: PlaneConfig, ray_address: str | None, *, label: str = "agentloop"
) -> AsyncClient:
    """A client of a plane that exists already, by the name that traces call it."""
    if ray_address is not None:
        import ray

        if not ray.is_initialized():
            init = cast("Callable[..., object]", cast("Any", ray).init)
            await asyncio.to_thread(init, ray_address, log_to_driver=False)
    named = {"label": label, **plane.settings}
    return await async_connect(plane.name, address=plane.address, config=named)


class NoTokenizer:
    """Stands where a worker has no tokenizer, and says so to whoever needs one."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"tokenizer.{name}: this worker's settings name no model_path")


def load_tokenizer(path: Path | None) -> ChatTokenizer:
    """The tokenizer of a local model folder. ValueError if there is no such folder."""
    if path is None:
        return cast("ChatTokenizer", NoTokenizer())
    if not path.is_dir():
        raise ValueError(f"there is no model folder {str(path)!r}")
    return ChatTokenizer.from_pretrained(str(path))


def make_loop(config: TaskConfig) -> AgentLoop:
    """The agent loop of a task."""
    options = dict(config.loop.options)
    if "tools" in options:
        options["tools"] = make_tools(options["tools"])
    loop: object = load(config.loop.path)(**options)
    if not isinstance(loop, AgentLoop):
        raise ValueError(f"{config.loop.path} is no AgentLoop")
    return loop


def make_task(
    config: TaskConfig, engine: Engine, tokenizer: ChatTokenizer, *, evaluates: bool
) -> Task:
    """A task as a worker runs it."""
    valid: Callable[..., bool] | None = None
    if config.is_valid_sample is not None:
        valid = load(config.is_valid_sample)
    return Task(
        name=config.name,
        loop=make_loop(config),
        engine=engine,
        tokenizer=tokenizer,
        sampling=sampling_of(config.sampling),
        reward=None if config.reward is None else make_reward(config.reward),
        is_valid_sample=valid,
        incomplete=config.incomplete,
        filtered=config.filtered,
        declared_bytes=config.declared_bytes,
        session_timeout_s=config.session_timeout_s,
        turn_timeout_s=config.turn_timeout_s,
        admission_timeout_s=config.admission_timeout_s,
        partial_rollout=config.partial_rollout,
        evaluates=evaluates,
    )


def sampling_of(config: Mapping[str, Any]) -> Sampling:
    """How to sample, as a config file has it."""
    lists = {name: tuple(config[name]) for name in ("stop", "stop_token_ids") if name in config}
    arguments: dict[str, Any] = {**config, **lists}
    return Sampling(**arguments)


@dataclass(slots=True)
class Assembled:
    """A producer and what it stands on."""

    client: AsyncClient
    producer: Producer

    async def close(self) -> None:
        await self.producer.close()
        await self.client.close()


async def assemble(config: WorkerConfig, clock: PlaneClock | None = None) -> Assembled:
    """A producer that has joined the plane; `clock` is the process's, if it has one already."""
    client = await join_plane(config.plane, config.ray_address)
    tokenizer = await asyncio.to_thread(load_tokenizer, config.model_path)
    engine = await asyncio.to_thread(
        make_engine,
        config.engine,
        tokenizer,
        None if config.model_path is None else str(config.model_path),
    )
    if isinstance(engine, SupervisedEngine):
        await engine.start()  # now, and not when the first prompt waits for it
    tasks = {
        task.name: make_task(task, engine, tokenizer, evaluates=evaluates)
        for evaluates, configs in ((False, config.tasks), (True, config.eval_tasks))
        for task in configs
    }
    connect = partial(
        dataplane.connect,
        config.plane.name,
        address=config.plane.address,
        config=config.plane.settings,
    )
    return Assembled(client, Producer(client, tasks, connect=connect, clock=clock))


def settle_memory() -> None:
    """Keep the garbage collector from holding up the event loop. For processes that only do this.

    What is loaded by now is taken out of its sight for good: a full collection would walk every
    module of torch and transformers, 0.3 s. And it comes less often: with a thousand sessions under
    way the default of every 700 objects took a third of the processor, to find nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)

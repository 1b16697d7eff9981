"""From the settings of a run's rollouts to producers that are ready."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dataplane
from agentloop.assembly import join_plane, load_tokenizer, make_task
from agentloop.config import (
    DemonstrationsConfig,
    PlaneConfig,
    RolloutsConfig,
    TaskConfig,
    WorkerConfig,
)
from agentloop.datasets import Dataset, Sampler, make_dataset
from agentloop.dotted import load
from agentloop.engines.demonstrator import Demonstrator
from agentloop.groups.plane_clock import PlaneClock
from agentloop.groups.producer import Producer
from agentloop.loops.chat import ChatTokenizer
from agentloop.production.seats import Seats
from agentloop.production.staffing import make_seats
from agentloop.rollouts.line import Line
from agentloop.rollouts.rollouts import AgentRollouts, Demonstration, Evaluation
from agentloop.workers.local import LocalWorker
from agentloop.workers.types import Worker
from dataplane import AsyncClient


async def open_rollouts(
    settings: Mapping[str, Any],
    *,
    plane: Mapping[str, Any],
    partitions: Mapping[str, str],
    model_path: str,
    seed: int,
    run_id: str,
    ray_address: str | None,
) -> AgentRollouts:
    """Start the producers of a run, with the weights and the tokenizer of a model's folder.

    Args:
        settings: What `RolloutsConfig` says.
        plane: `name`, `address`, `settings` of the plane, which is there.
        partitions: Names of those for `train`, `evaluate` and `demonstrate`.
        seed: Of the order of prompts, and of the noise of tasks whose `sampling` has no seed.
        run_id: Names the run: the same one draws the same prompts under the same uids.
        ray_address: The cluster of a plane that Ray hosts.

    Raises:
        ValueError: the settings make no sense, or a dataset or the model is not there.
        NoWorkers: none could be started.
    """
    config = RolloutsConfig.model_validate(settings)
    where = PlaneConfig.model_validate(plane)
    absent = [name for name in ("train", "evaluate", "demonstrate") if name not in partitions]
    if absent:
        raise ValueError(f"there is no partition named for {', '.join(absent)}")
    config = _seeded(config, seed)
    tokenizer = await asyncio.to_thread(load_tokenizer, Path(model_path))
    shown = {name: _tasks_of(name, each, config) for name, each in config.demonstrations.items()}
    demonstrators = {
        name: _demonstrator(name, each, tokenizer, seed)
        for name, each in config.demonstrations.items()
    }
    tasks = [*config.tasks, *config.eval_tasks, *(t for some in shown.values() for t in some)]
    datasets = await _datasets(tasks, tokenizer)
    async with AsyncExitStack() as resources:
        client = await join_plane(where, ray_address, label="rollouts")
        resources.push_async_callback(client.close)
        reader = await asyncio.to_thread(
            dataplane.connect, where.name, address=where.address, config=where.settings
        )
        resources.push_async_callback(asyncio.to_thread, reader.close)
        here = _Here(config, client, tokenizer, datasets, PlaneClock(), run_id)
        seats = make_seats(
            config.workers,
            WorkerConfig(
                plane=where,
                ray_address=ray_address,
                model_path=Path(model_path),
                engine=config.engine,
                tasks=config.tasks,
                eval_tasks=config.eval_tasks,
            ),
            here.clock,
        )
        resources.push_async_callback(seats.close)
        await seats.open()
        demonstrations: dict[str, Demonstration] = {}
        for name, demonstrator in demonstrators.items():
            groups = config.demonstrations[name].groups
            staff = here.demonstrating(demonstrator, shown[name], groups)
            resources.push_async_callback(staff.close)
            await staff.open()
            line = here.line(staff, shown[name], partitions["demonstrate"], _derived(seed, name))
            demonstrations[name] = Demonstration(line, demonstrator)
        return AgentRollouts(
            client=client,
            reader=reader,
            seats=seats,
            clock=here.clock,
            train=here.line(seats, config.tasks, partitions["train"], seed),
            evaluation=Evaluation(
                [(task, datasets[_key(task)]) for task in config.eval_tasks],
                partitions["evaluate"],
            ),
            demonstrations=demonstrations,
            dataset_size=sum(len(datasets[_key(task)]) for task in config.tasks),
            workers=config.workers.count,
            run_id=run_id,
            resources=resources.pop_all(),
        )


@dataclass(frozen=True, slots=True)
class _Here:
    """What all lines of a run share."""

    config: RolloutsConfig
    client: AsyncClient
    tokenizer: ChatTokenizer
    datasets: Mapping[str, Dataset]
    clock: PlaneClock
    run_id: str

    def line(self, seats: Seats, tasks: Sequence[TaskConfig], partition_id: str, seed: int) -> Line:
        """A line of these tasks, their prompts in the order of the seed."""
        return Line(
            self.client,
            seats,
            [(task, self._sampler(task, seed)) for task in tasks],
            partition_id=partition_id,
            clock=self.clock,
            persist_prompts=self.config.persist_prompts,
            reissues=self.config.reissues,
        )

    def _sampler(self, task: TaskConfig, seed: int) -> Sampler:
        return Sampler(
            self.datasets[_key(task)], seed=seed, repeat=task.n, run_id=self.run_id, name=task.name
        )

    def demonstrating(
        self, demonstrator: Demonstrator, tasks: Sequence[TaskConfig], groups: int
    ) -> Seats:
        """A worker in this process that a demonstrator answers in."""

        async def start() -> Worker:
            made = {
                task.name: make_task(task, demonstrator, self.tokenizer, evaluates=False)
                for task in tasks
            }
            return LocalWorker(Producer(self.client, made, clock=self.clock))

        return Seats([start], groups)


def _seeded(config: RolloutsConfig, seed: int) -> RolloutsConfig:
    """With a seed for the noise of every task."""

    def with_seed(tasks: Sequence[TaskConfig]) -> list[TaskConfig]:
        return [
            task.model_copy(update={"sampling": {"seed": seed, **task.sampling}}) for task in tasks
        ]

    return config.model_copy(
        update={"tasks": with_seed(config.tasks), "eval_tasks": with_seed(config.eval_tasks)}
    )


def _tasks_of(
    name: str, demonstrations: DemonstrationsConfig, config: RolloutsConfig
) -> list[TaskConfig]:
    """The tasks of a demonstration, under names of their own: several share a partition."""
    own = demonstrations.tasks
    taken: dict[str, Any] = {} if own else {"n": 1, "reward": None, "is_valid_sample": None}
    return [
        task.model_copy(update={**taken, "name": f"{name}/{task.name}"})
        for task in own or config.tasks
    ]


def _demonstrator(
    name: str, config: DemonstrationsConfig, tokenizer: ChatTokenizer, seed: int
) -> Demonstrator:
    path, options = config.demonstrator.path, config.demonstrator.options
    try:
        made: object = load(path)(tokenizer, seed=_derived(seed, name), **options)
    except TypeError as error:
        raise ValueError(f"demonstration {name!r}: {path}: {error}") from error
    if not isinstance(made, Demonstrator):
        raise ValueError(f"demonstration {name!r}: {path} is no Demonstrator")
    return made


async def _datasets(tasks: Sequence[TaskConfig], tokenizer: ChatTokenizer) -> dict[str, Dataset]:
    """The datasets of tasks, each made once however many tasks draw on it."""
    wanted = {_key(task): task.dataset for task in tasks}
    made = await asyncio.gather(
        *(asyncio.to_thread(make_dataset, config, tokenizer) for config in wanted.values())
    )
    return dict(zip(wanted, made, strict=True))


def _key(task: TaskConfig) -> str:
    """A dataset's settings as a name."""
    return json.dumps(task.dataset, sort_keys=True, default=repr)


def _derived(seed: int, name: str) -> int:
    """Another seed, so that a demonstration does not show what is trained next."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")

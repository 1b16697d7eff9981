"""The rollout side of a run: training, evaluation and demonstrations, each in its partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final, cast

from agentloop.config import TaskConfig
from agentloop.datasets import Dataset, Sampler
from agentloop.engines.demonstrator import Demonstrator
from agentloop.groups.plane_clock import PlaneClock
from agentloop.production.accounting import ProduceResult
from agentloop.production.manager import ManagedTask, RolloutManager
from agentloop.production.prompts import managed
from agentloop.production.seats import Seats
from agentloop.production.split import split_by_weight
from agentloop.rollouts.line import Line
from dataplane import AsyncClient, Client, PartitionNotFound

_STATE: Final = 1
"""Version of `state()`."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A demonstrator and the line of its episodes."""

    line: Line
    demonstrator: Demonstrator


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is evaluated, and where."""

    tasks: Sequence[tuple[TaskConfig, Dataset]]
    partition_id: str


class AgentRollouts:
    """The producers of a run; made by `open_rollouts`. One call at a time.

    It implements `trainer.rollouts.Rollouts`, whose docstrings say what each call is for.
    """

    def __init__(
        self,
        *,
        client: AsyncClient,
        reader: Client,
        seats: Seats,
        clock: PlaneClock,
        train: Line,
        evaluation: Evaluation,
        demonstrations: Mapping[str, Demonstration],
        dataset_size: int,
        workers: int,
        run_id: str,
        resources: AsyncExitStack,
    ) -> None:
        """`reader` answers where nobody may wait; `resources` are ended by `close`."""
        self._client = client
        self._reader = reader
        self._seats = seats
        self._clock = clock
        self._train = train
        self._evaluation = evaluation
        self._demonstrations = dict(demonstrations)
        self._dataset_size = dataset_size
        self._workers = workers
        self._run_id = run_id
        self._resources = resources

    @property
    def dataset_size(self) -> int:
        """Prompts of one epoch, over all tasks that are trained."""
        return self._dataset_size

    @property
    def workers(self) -> int:
        """How many workers generate."""
        return self._workers

    # -- producing ---------------------------------------------------------------------------

    async def produce(self, batch_size: int, train_step: int) -> ProduceResult:
        """Have `batch_size` finished groups in the partition of training."""
        return await self._train.produce(batch_size, train_step)

    async def demonstrate(self, name: str, batch_size: int, train_step: int) -> ProduceResult:
        """The same in the partition of demonstrations.

        Raises:
            ValueError: there is no demonstration of this name.
        """
        demonstration = self._demonstrations.get(name)
        if demonstration is None:
            known = ", ".join(self._demonstrations) or "none"
            raise ValueError(f"there is no demonstration {name!r}; there are: {known}")
        # Demonstrations do not age: they are of the version that a rollout of now would have.
        demonstration.demonstrator.policy_version = max(train_step - 1, 0)
        return await demonstration.line.produce(batch_size, train_step)

    async def evaluate(
        self, train_step: int, *, prompts: int | None, greedy: bool
    ) -> ProduceResult:
        """So many prompts in the partition of evaluation, all if not given, the same each time.

        What is there from before is cleared first: it was of other weights. `greedy` takes the
        likeliest token, and one session a prompt.

        Raises:
            ValueError: no task is evaluated, or no prompt.
        """
        tasks, partition_id = self._evaluation.tasks, self._evaluation.partition_id
        if not tasks or (prompts is not None and prompts < 1):
            raise ValueError(f"{prompts} prompts of {len(tasks)} eval_tasks: nothing to evaluate")
        counts = [len(dataset) for _, dataset in tasks]
        if prompts is not None:
            shares = split_by_weight(prompts, [task.weight for task, _ in tasks])
            counts = [min(share, size) for share, size in zip(shares, counts, strict=True)]
        await self._empty(partition_id)
        begun: list[ManagedTask] = []
        for (task, dataset), count in zip(tasks, counts, strict=True):
            its = task.model_copy(update={"n": 1}) if greedy else task
            sampler = Sampler(
                dataset,
                shuffle=False,
                repeat=its.n,
                run_id=self._run_id,
                name=f"{task.name}@{train_step}{'/greedy' if greedy else ''}",
            )
            one = managed(its, partition_id, sampler.next, greedy=greedy)
            one.weight = count
            begun.append(one)
        manager = RolloutManager(
            self._client, self._seats, begun,
            partition_id=partition_id, persist_prompts=False, clock=self._clock,
        )  # fmt: skip
        return await manager.produce(sum(counts), train_step)

    async def update_weights(self, version: int) -> None:
        """Generate with the weights that lie in the plane as this version."""
        await self._seats.update_weights(version)

    async def _empty(self, partition_id: str) -> None:
        try:
            await self._client.kv_clear(None, partition_id, where={}, retire=True)
        except PartitionNotFound:
            pass  # the first time

    # -- resuming ----------------------------------------------------------------------------

    async def recover(self, train_step: int) -> int:
        """Take over prompts that an earlier run left in the plane without a last status; how many.

        Those that it left finished count for the next batch. None of either is drawn again.
        """
        return sum([await line.recover(train_step) for line in self._lines()])

    def state(self) -> dict[str, Any]:
        """Where the datasets are: plain data that `restore` goes on from.

        Prompts that were drawn and lie in the plane yet, so that they are not trained, are drawn
        again by who restores it.
        """
        return {
            "version": _STATE,
            "run_id": self._run_id,
            "train": self._train.state(self._reader),
            "demonstrations": {
                name: each.line.state(self._reader) for name, each in self._demonstrations.items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Draw on from where the state was taken, as the same run.

        Raises:
            ValueError: it is of other datasets; nothing is changed.
        """
        if state.get("version") != _STATE:
            raise ValueError(
                f"a state of rollouts of version {state.get('version')!r}; this reads {_STATE}"
            )
        run_id = state.get("run_id")
        saved = cast("object", state.get("demonstrations"))
        train = cast("object", state.get("train"))
        if not (
            isinstance(run_id, str) and isinstance(train, Mapping) and isinstance(saved, Mapping)
        ):
            raise ValueError("no state of rollouts: it lacks run_id, train or demonstrations")
        demonstrations = cast("Mapping[str, Any]", saved)
        if set(demonstrations) != set(self._demonstrations):
            raise ValueError(
                f"the saved demonstrations are {sorted(demonstrations)}, those here are "
                f"{sorted(self._demonstrations)}"
            )
        parts = [(self._train, cast("Mapping[str, Any]", train))]
        parts += [(each.line, demonstrations[name]) for name, each in self._demonstrations.items()]
        before = [line.state(self._reader) for line, _ in parts]
        try:
            for line, part in parts:
                line.restore(part)
        except ValueError:
            for (line, _), part in zip(parts, before, strict=True):
                line.restore(part)
            raise
        self._run_id = run_id

    async def close(self) -> None:
        """End workers, demonstrators and connections. Repeatable."""
        await self._resources.aclose()

    def _lines(self) -> list[Line]:
        return [self._train, *(each.line for each in self._demonstrations.values())]
